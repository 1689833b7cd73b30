"""Does the tree keep the layers, caps and lean import that the design promises?"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "adaptiveload_hf"
CAPS = {"adaptiveload_hf": 400, "recipes": 400, "tests": 400}
TOP_LEVEL = {
    *("adaptiveload_hf", "csrc", "recipes", "tests", "accelerate_configs", "setup.cfg", "setup.py"),
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile", "docs"),
}
# From the bottom up; a module imports only from rows before its own (see docs/design.md).
LAYERS = [
    {"errors", "adaln.first_call", "adaln.onlookers", "adaln.schema_digest", "adaln.source", "adaln.tested_sources"},
    {"adaln.extension", "adaln.runtime", "adaln.triton_kernels", "buckets.row_bytes", "buckets.shapes"},
    {"adaln.triton_ops"},
    {
        "adaln.adapters",
        "adaln.reference",
        "adaln.effects",
        "adaln.inlining",
        "buckets.collate",
        "buckets.cost",
        "buckets.latent_files",
        "buckets.transformers",
        "device_memory",
        "figures",
        "hub",
        "tables",
    },
    {
        "adaln.gradients",
        "adaln.patch_tokens",
        "adaln.patterns",
        "buckets.deal",
        "buckets.flops",
        "buckets.memory",
        "buckets.points",
        "buckets.sample_rows",
        "buckets.search",
        "buckets.state",
        "environment",
        "fit_figures",
        "run_figures",
    },
    {"card", "adaln.families", "adaln.more_families", "adaln.pairs", "buckets.fit", "buckets.workload"},
    {"buckets.findings"},
    {
        "adaln.registry",
        "adaln.rewrite",
        "buckets.plan",
        "buckets.schedule",
        "buckets.tar_index",
        "buckets.training_log",
    },
    {
        *("adaln.projections", "adaln.schemas", "buckets.ranks", "buckets.simulate", "buckets.sources", "config_file"),
        "load_figures",
    },
    {"adaln.ops", "buckets.sampler", "config", "distributed", "report", "restart", "scan"},
    {"adaln.queries", "buckets.loader"},
    {"adaln.forwards", "benchmark", "monitor", "preflight"},
    {"adaln.attention"},
    {"adaln.patch_report"},
    {"adaln.patch"},
    {"commands.arguments"},
    {
        *("commands.count", "commands.fit", "commands.plan", "commands.push", "commands.report", "commands.scan"),
        "commands.simulate",
    },
    {"cli"},
]


def python_files(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def package_imports(path):
    """Dotted names inside adaptiveload_hf that a module imports, absolute or relative."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level] if node.level else ()
            if node.level or (node.module or "").split(".")[0] == "adaptiveload_hf":
                module = (node.module or "").removeprefix("adaptiveload_hf").lstrip(".")
                stem = ".".join([*base, *([module] if module else [])])
                yield stem
                yield from (f"{stem}.{alias.name}".lstrip(".") for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("adaptiveload_hf."):
                    yield alias.name.removeprefix("adaptiveload_hf.")


@pytest.mark.parametrize(("half", "other"), [("adaln", "buckets"), ("buckets", "adaln")])
def test_the_halves_never_import_each_other(half, other):
    for path in python_files(f"adaptiveload_hf/{half}"):
        found = [name for name in package_imports(path) if name.split(".")[0] == other]
        assert not found, f"{path.relative_to(ROOT)} imports {found}"


def test_modules_import_only_from_lower_layers():
    layer = {name: height for height, names in enumerate(LAYERS) for name in names}
    for path in python_files("adaptiveload_hf"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if path.stem != "__init__":
            assert name in layer, f"{name} has no place in LAYERS"
            above = [target for target in package_imports(path) if layer.get(target, -1) >= layer[name]]
            assert not above, f"{name} imports {above}, which are not below it"


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import sys, adaptiveload_hf; print([m for m in ('torch','diffusers','datasets','scipy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"


def test_every_public_name_exists():
    import adaptiveload_hf

    for name in adaptiveload_hf.__all__:
        assert getattr(adaptiveload_hf, name) is not None


@pytest.mark.parametrize("folder", CAPS)
def test_python_files_stay_within_their_caps(folder):
    for path in python_files(folder):
        lines = len(path.read_text().splitlines())
        assert lines <= CAPS[folder], f"{path.relative_to(ROOT)} has {lines} lines, the cap is {CAPS[folder]}"


def test_functions_stay_within_60_lines():
    for path in python_files("adaptiveload_hf", "recipes"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = node.body[0] if ast.get_docstring(node) else None
                lines = node.end_lineno - node.lineno + 1
                lines -= docstring.end_lineno - docstring.lineno + 1 if docstring else 0
                assert lines <= 60, f"{path.relative_to(ROOT)}: {node.name} has {lines} lines beside its docstring"


def test_kernels_include_no_torch_header_and_stay_short():
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".cu", ".cuh", ".h", ".cpp"}]
    assert {p.parent.name for p in sources} == {"csrc", "ops"}
    for path in sources:
        text = path.read_text()
        torch_header = re.search(r'#include\s*[<"](torch|ATen|c10)/', text)
        assert path.parent.name == "ops" or not torch_header, f"{path.name} includes a torch header"
        assert len(text.splitlines()) <= 350, f"{path.name} is longer than 350 lines"


def test_the_top_level_holds_only_what_the_owner_fixed():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    top = {name.split("/")[0] for name in tracked if name and not name.startswith(".")}
    assert top <= TOP_LEVEL, f"not in the design: {sorted(top - TOP_LEVEL)}"


def test_no_module_is_named_for_nothing():
    for path in python_files("adaptiveload_hf", "recipes", "tests"):
        assert path.stem not in {"utils", "common", "helpers", "misc", "base"}, path
