"""Can this machine build the CUDA kernels? All metadata is in setup.cfg; this file only adds the extension."""

import os
import re
import runpy
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

OLDEST_TORCH = (2, 11)  # std::vector and std::optional in the stable ABI of csrc/ops
TORCH_TARGET_VERSION = "0x020b000000000000"  # 2.11: major, minor, patch as one byte each
ARCHITECTURES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
PYTHON_TAG = "cp310"


def import_torch():
    """torch with its extension builder, or None: pip's isolated builds have no torch."""
    try:
        import torch
        import torch.utils.cpp_extension
    except ImportError:
        return None
    return torch


def find_nvcc(torch) -> Path | None:
    """The nvcc of the toolkit that torch would build with."""
    home = torch.utils.cpp_extension.CUDA_HOME
    nvcc = Path(home) / "bin" / "nvcc" if home else None
    return nvcc if nvcc is not None and nvcc.exists() else None


def ask_nvcc(nvcc: Path, flag: str) -> str:
    return subprocess.run([nvcc, flag], capture_output=True, text=True, check=True).stdout


def why_not_built(torch) -> str | None:
    """Why this machine gets the package without CUDA kernels, or None if it can build them."""
    if torch is None:
        return (
            "torch cannot be imported here (pip builds in an isolated environment). "
            "For the kernels: install torch first, then `pip install --no-build-isolation .`"
        )
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        return f"torch {torch.__version__} is older than {'.'.join(map(str, OLDEST_TORCH))}"
    nvcc = find_nvcc(torch)
    if nvcc is None:
        return "nvcc was not found: install the CUDA toolkit, or set CUDA_HOME to it"
    release = re.search(r"release (\d+)\.\d+", ask_nvcc(nvcc, "--version")).group(1)
    if release != torch.version.cuda.split(".")[0]:
        return f"nvcc is of CUDA {release}, but torch {torch.__version__} of CUDA {torch.version.cuda}"
    return None


def choose_architectures(known: str) -> str:
    """TORCH_CUDA_ARCH_LIST for an nvcc whose --list-gpu-arch says `known`; PTX of the newest for GPUs to come."""
    wanted = [a for a in ARCHITECTURES if f"compute_{a.replace('.', '')}" in known.split()]
    return ";".join(wanted) + "+PTX"


def extension_options(torch) -> dict:
    """The arguments of `setup` that build csrc/ as adaptiveload_hf/_C.abi3.so."""
    from torch.utils.cpp_extension import BuildExtension, CUDAExtension

    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", choose_architectures(ask_nvcc(find_nvcc(torch), "--list-gpu-arch")))
    # -DUSE_CUDA makes torch's headers declare the stream shim; both compilers must see one target version.
    flags = ["-O3", "-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
    # The package refuses a build for other schemas than its own.
    package = Path("adaptiveload_hf/adaln")
    digest = runpy.run_path(str(package / "schema_digest.py"))["schema_digest"](package / "schemas.py")
    extension = CUDAExtension(
        "adaptiveload_hf._C",
        sources=[str(path) for pattern in ("*.cu", "ops/*.cpp") for path in sorted(Path("csrc").glob(pattern))],
        depends=[str(path) for pattern in ("*.h", "*.cuh", "ops/*.h") for path in sorted(Path("csrc").glob(pattern))],
        extra_compile_args={"cxx": [*flags, f"-DADAPTIVELOAD_SCHEMAS={digest}"], "nvcc": [*flags, "--threads=4"]},
        # Where the compiler brings libstdc++ as an archive, its streams would mix with those of torch's and crash.
        extra_link_args=["-Wl,--exclude-libs,ALL"],
        py_limited_api=True,
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": PYTHON_TAG}},
    }


class SourceArchive(sdist):
    """The package and csrc, on any machine: setuptools adds csrc only where the extension can be built."""

    def make_distribution(self):
        self.filelist.graft("csrc")
        self.filelist.prune("tests")
        super().make_distribution()


def main():
    torch = import_torch()
    reason = why_not_built(torch)
    options = {} if reason is not None else extension_options(torch)
    if reason is not None:
        print(f"adaptiveload_hf: building without CUDA kernels: {reason}")
    setup(**options | {"cmdclass": options.get("cmdclass", {}) | {"sdist": SourceArchive}})


if __name__ == "__main__":
    main()
