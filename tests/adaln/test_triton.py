"""Are the Triton kernels right where there is no GPU, do they compile for one, and do they stay out of the way?"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

ROWS = {"x": ("*bf16", "i32", "i32"), "m": ("*fp32", "i32", "i32")}
SIZES = ("tokens", "segments", "segment_rows", "chunks", "chunk_rows", "gate_rows", "norm_rows")
OPTIONS = {"D": 600, "TILE": 512, "CENTER": True, "HEAD": 0, "GATE_PER_TOKEN": False, "STAGES": 3}
LAUNCH = {"num_warps": 2, "enable_fp_fusion": True}
# scale, shift, weight, bias, tables: all but bias
NORM = (ROWS["m"], ROWS["m"], "*fp32", None, "*fp32", "*fp32", "fp32", "fp32")


@needs_triton
def test_the_kernels_are_right_under_the_interpreter():
    # In a process of its own: Triton looks at the variable when it is imported.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/adaln/test_triton_kernels.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert "skipped" not in done.stdout


def compile_for_hopper(kernel, types, options):
    """PTX of a kernel for sm_90. `types`: parameter -> Triton type, a tuple of them; what is not there is None."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants = {}, dict(options)
    for index, name in enumerate(kernel.arg_names):
        found = types.get(name)
        signature[name] = found or "constexpr"
        if isinstance(found, tuple):
            signature[name] = tuple(t or "constexpr" for t in found)
            constants.update({(index, i): None for i, t in enumerate(found) if t is None})
        elif found is None:
            constants.setdefault(name, None)
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=LAUNCH).asm["ptx"]


@needs_triton
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_the_kernels_compile_for_a_gpu(gated, per_token):
    # The interpreter runs Python; what Triton compiles is less than that.
    from adaptiveload_hf.adaln import triton_kernels

    sizes = dict.fromkeys(SIZES, "i32") | dict.fromkeys(("eps", "gate_offset"), "fp32")
    gates = {"y": ROWS["x"], "gate": ROWS["m"], "residual": "*bf16", "dy": "*bf16"} if gated else {}
    shared = {"x": ROWS["x"], "stats": "*fp32", "norm": NORM, **sizes, **gates}
    options = {**OPTIONS, "NORM": True, "NORM_PER_TOKEN": per_token}
    compile_for_hopper(triton_kernels.forward, {**shared, "out": "*bf16"}, options)
    sums = ("*fp32" if gated else None, None if per_token else "*fp32", "*fp32", "*fp32", None)
    outputs = {"dx": "*bf16", "sums": sums} | ({"dscale": "*fp32"} if per_token else {})
    assert "cp.async" in compile_for_hopper(triton_kernels.backward, {**shared, "grad": ROWS["x"], **outputs}, options)


def test_importing_the_ops_does_not_import_triton():
    script = "import sys, adaptiveload_hf.adaln.ops; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
