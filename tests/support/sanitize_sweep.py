"""Runs every CUDA kernel on small inputs, for compute-sanitizer (`make sanitize`). Not a test: it compares nothing."""

import itertools

import torch

from adaptiveload_hf.adaln import ops

S = 12
MANY = 1100  # rows enough for every block to go through its ring more than once


def modulation(rows, width, dtype):
    return torch.randn(2, rows, 6, width, device="cuda").to(dtype).unbind(2)[:3]


def activation(tokens, width, dtype):
    return torch.randn(2, tokens, width, device="cuda").to(dtype).requires_grad_()


def run(op, *operands, **options):
    leaves = [t.detach().requires_grad_() for t in operands]
    outputs = getattr(ops, op)(*leaves, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.grad(outputs, leaves, [torch.randn_like(output) for output in outputs])


def run_all(width, rows, dtype, tokens=S):
    x, y = activation(tokens, width, dtype), activation(tokens, width, dtype)
    scale, shift, gate = modulation(rows, width, torch.float32)
    column = torch.randn(width, device="cuda", dtype=dtype).requires_grad_()
    run("layer_norm_modulate", x, scale, shift, out_dtype=dtype)
    ops.layer_norm_modulate(x, scale, shift, out_dtype=dtype).sum().backward()  # frozen modulation
    tables = {"weight": column, "bias": column, "scale_table": column, "shift_table": column}
    ops.layer_norm_modulate(x, scale, shift, **tables, out_dtype=dtype).sum().backward()
    run("rms_norm_modulate", x, scale, shift, weight=column, out_dtype=dtype)
    run("gate_residual", x, y, gate, gate_table=column, out_dtype=dtype)
    dtypes = {"residual_dtype": dtype, "out_dtype": dtype}
    run("gate_residual_layer_norm_modulate", x, y, gate, scale, shift, **dtypes)
    if width % 32 == 0:
        angles = torch.randn(1, tokens, 1, width // 4, device="cuda")
        weight = torch.randn(width, device="cuda", dtype=dtype).requires_grad_()
        ops.rms_norm_rope(x, weight, angles.cos(), angles.sin(), heads=4).sum().backward()
        of_head = angles[:, : tokens // 2, :, :64]  # each head by itself, half of the tokens turned
        ops.rms_norm_rope(x, weight[:64], of_head.cos(), of_head.sin(), heads=width // 64).sum().backward()


if __name__ == "__main__":
    if reason := ops.extension_missing_reason():
        raise SystemExit(f"sanitize_sweep: the extension is missing: {reason}")
    for case in itertools.product((33, 1536, 5120), (1, 4, S), (torch.bfloat16, torch.float32)):
        run_all(*case)
    # Without rings, of several rows a block; with them, of several groups of threads a block, and of one.
    for width, tokens in ((1536, 150), (1536, 600), (1152, MANY), (1536, MANY), (2432, MANY), (5120, MANY)):
        run_all(width, 1, torch.bfloat16, tokens)
    torch.cuda.synchronize()
    print(f"ran {', '.join(sorted(ops.OPS))}")
