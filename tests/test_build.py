"""Does setup.py build the kernels where it can, and the pure-Python package everywhere else?"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import adaptiveload_hf
from adaptiveload_hf.adaln.schema_digest import schema_digest

ROOT = Path(__file__).parent.parent
NVCC_13 = "echo 'Cuda compilation tools, release 13.0, V13.0.88'"


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("build_of_adaptiveload", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_torch(version="2.12.0+cu130", cuda="13.0", home=None):
    """What setup.py asks of torch."""
    extension = SimpleNamespace(CUDA_HOME=home)
    return SimpleNamespace(
        __version__=version, version=SimpleNamespace(cuda=cuda), utils=SimpleNamespace(cpp_extension=extension)
    )


def make_toolkit(folder, script=NVCC_13):
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\n{script}\n")
    nvcc.chmod(0o755)
    return str(folder)


def test_each_reason_not_to_build_is_named(build, tmp_path):
    toolkit = make_toolkit(tmp_path)
    assert "pip install --no-build-isolation ." in build.why_not_built(None)
    assert "built without CUDA" in build.why_not_built(make_torch("2.13.0+cpu", cuda=None, home=toolkit))
    assert "torch 2.10.0 is older than 2.11" in build.why_not_built(make_torch("2.10.0", home=toolkit))
    assert "set CUDA_HOME" in build.why_not_built(make_torch(home=None))
    assert "set CUDA_HOME" in build.why_not_built(make_torch(home=str(tmp_path / "nowhere")))
    mismatch = build.why_not_built(make_torch("2.12.0+cu128", cuda="12.8", home=toolkit))
    assert mismatch == "nvcc is of CUDA 13, but torch 2.12.0+cu128 of CUDA 12.8"
    assert build.why_not_built(make_torch(home=toolkit)) is None


def test_only_architectures_that_nvcc_knows_are_asked_for_and_ptx_of_the_newest(build):
    known = "compute_75 compute_80 compute_86 compute_89 compute_90 compute_100 compute_120"
    assert build.choose_architectures(known) == "8.0;8.6;8.9;9.0;10.0;12.0+PTX"
    assert build.choose_architectures("compute_80\ncompute_86\ncompute_89\ncompute_90\n") == "8.0;8.6;8.9;9.0+PTX"


def test_the_users_own_architecture_list_is_kept(build, monkeypatch, tmp_path):
    captured = {}
    fake = SimpleNamespace(BuildExtension="builder", CUDAExtension=lambda name, **options: captured.update(options))
    monkeypatch.setitem(sys.modules, "torch.utils.cpp_extension", fake)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.chdir(ROOT)
    options = build.extension_options(make_torch(home=make_toolkit(tmp_path)))
    assert build.os.environ["TORCH_CUDA_ARCH_LIST"] == "9.0"
    assert options["options"] == {"bdist_wheel": {"py_limited_api": "cp310"}}
    assert captured["py_limited_api"] is True
    assert captured["extra_link_args"] == ["-Wl,--exclude-libs,ALL"]
    assert {"csrc/gate_residual.cu", "csrc/ops/gate_residual.cpp"} <= set(captured["sources"])
    target = "-DTORCH_TARGET_VERSION=0x020b000000000000"
    assert all({target, "-DUSE_CUDA"} <= set(flags) for flags in captured["extra_compile_args"].values())
    digest = schema_digest(ROOT / "adaptiveload_hf" / "adaln" / "schemas.py")
    assert f"-DADAPTIVELOAD_SCHEMAS={digest}" in captured["extra_compile_args"]["cxx"]


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True, **options)
    if "invalid command 'bdist_wheel'" in done.stderr or "No module named" in done.stderr:
        pytest.skip("this environment has no setuptools that builds wheels")
    assert done.returncode == 0, done.stderr
    return done.stdout


def copy_checkout(folder):
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "demo_output", "__pycache__")
    return Path(shutil.copytree(ROOT, folder, ignore=ignored))


def test_an_editable_install_is_found_from_the_folder_above_the_checkout(tmp_path):
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    checkout, installed = copy_checkout(tmp_path / "adaptiveload_hf"), tmp_path / "installed"
    code = f"import setuptools.build_meta as backend; backend.build_editable({str(tmp_path)!r})"
    run(sys.executable, "-c", code, cwd=checkout)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(installed)
    code = f"import site; site.addsitedir({str(installed)!r}); import adaptiveload_hf; print(adaptiveload_hf.__file__)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = run(sys.executable, "-S", "-c", code, cwd=tmp_path, env=environment)
    assert Path(found.strip()) == checkout / "adaptiveload_hf" / "__init__.py"


def test_the_sdist_holds_csrc_and_its_wheel_without_cuda_is_the_typed_package_alone(tmp_path):
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    checkout = copy_checkout(tmp_path / "checkout")
    run(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", tmp_path, cwd=checkout)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert {str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.*")} <= files
    assert {"setup.py", "setup.cfg", "LICENSE", "README.md"} <= files

    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", tmp_path, sdist)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()} == {
        "adaptiveload_hf",
        f"adaptiveload_hf-{adaptiveload_hf.__version__}.dist-info",
    }
    run(*pip, "install", "--no-deps", "--no-index", "-q", "--target", tmp_path / "installed", wheel)
    code = "import adaptiveload_hf, importlib.resources as r; print(r.files(adaptiveload_hf).joinpath('py.typed'))"
    found = run(sys.executable, "-P", "-c", code, env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")})
    assert Path(found.strip()) == tmp_path / "installed" / "adaptiveload_hf" / "py.typed"
    assert Path(found.strip()).is_file()


def test_kernels_compile_without_spills_and_warnings():
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    command = [ROOT / ".ci" / "compile_kernels.sh", sys.executable]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall("no spill, no warning", done.stdout)) == 2 * len(list(ROOT.glob("csrc/*.cu")))


@pytest.mark.gpu
def test_an_error_inside_the_extension_arrives_with_its_words():
    from adaptiveload_hf.adaln.extension import load_problem

    if load_problem is not None:
        pytest.skip(load_problem)
    # In a process of its own: words put together by another libstdc++ than torch's ended it.
    code = "import torch, adaptiveload_hf.adaln.ops; torch.ops.adaptiveload.device_error(99)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert re.search(r"RuntimeError: .*(device_guard|device)", done.stderr), done.stderr[-500:]
