"""Which kernels of others does kernel_speed.py put beside ours, and what do they leave out? Absent ones are skipped.

liger-kernel's layer norm has a weight and a bias for all samples instead of a modulation of each, so it does less.
Its modulated RMS norm is the same operation. cuDNN's adaptive layer norm takes 1 + scale ready-made.
"""

import functools
import importlib.util

import torch

EPS = 1e-6


def of_op(op: str) -> dict:
    """Contenders of an op (see kernel_cases) whose package can be imported here."""
    found = {}
    if importlib.util.find_spec("liger_kernel") is not None:
        found |= {"liger": _LIGER[op]} if op in _LIGER else {}
    if importlib.util.find_spec("cudnn") is not None and op == "layer_norm_modulate":
        found["cuDNN"] = cudnn_norm
    return found


def liger_layer_norm(x, scale, shift):
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    weight, bias = (t.detach()[0, 0].clone().requires_grad_() for t in (1 + scale, shift))
    return lambda: LigerLayerNormFunction.apply(x, weight, bias, EPS), [x, weight, bias]


def liger_rms_norm(x, scale, shift):
    from liger_kernel.ops.modulated_rms_norm import LigerModulatedRMSNormFunction

    rows = [t.detach().squeeze(1).contiguous().requires_grad_() for t in (scale, shift)]
    return lambda: LigerModulatedRMSNormFunction.apply(x, None, *rows, EPS, 0.0, "llama", False), [x, *rows]


def cudnn_norm(x, scale, shift):
    """Forward only, see kernel_speed.py."""
    x, gain, offset = x.detach(), *(t.detach().contiguous() for t in (1 + scale, shift))
    graph, ids = _cudnn_forward(tuple(x.shape), gain.dtype)

    def call():
        out = torch.empty_like(x)
        mean, rstd = (x.new_empty((*x.shape[:2], 1), dtype=torch.float32) for _ in range(2))
        _execute(graph, ids, (x, gain, offset, torch.full((1, 1, 1), EPS), out, mean, rstd))
        return out

    return call, []


_LIGER = {"layer_norm_modulate": liger_layer_norm, "rms_norm_modulate": liger_rms_norm}


@functools.cache
def _handle():
    import cudnn

    return cudnn.create_handle()


def _new_graph():
    import cudnn

    kinds = {"intermediate_data_type": cudnn.data_type.FLOAT, "compute_data_type": cudnn.data_type.FLOAT}
    return cudnn.pygraph(handle=_handle(), **kinds)


def _build(graph, tensors):
    import cudnn

    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return graph, tensors


def _tensor(graph, name, shape, dtype, by_value=False):
    strides = torch.empty(shape, device="meta").stride()
    return graph.tensor(name=name, dim=shape, stride=strides, data_type=dtype, is_pass_by_value=by_value)


def _wanted(tensor, dtype):
    return tensor.set_output(True).set_data_type(dtype)


@functools.cache
def _cudnn_forward(shape, dtype):
    import cudnn

    graph, row = _new_graph(), (shape[0], 1, shape[2])
    x = _tensor(graph, "x", shape, torch.bfloat16)
    gain, offset = _tensor(graph, "gain", row, dtype), _tensor(graph, "offset", row, dtype)
    eps = _tensor(graph, "eps", (1, 1, 1), torch.float32, by_value=True)
    out, mean, rstd = graph.adalayernorm(
        name="norm", norm_forward_phase=cudnn.norm_forward_phase.TRAINING,
        input=x, scale=gain, bias=offset, epsilon=eps,
    )  # fmt: skip
    outputs = (_wanted(out, torch.bfloat16), _wanted(mean, torch.float32), _wanted(rstd, torch.float32))
    return _build(graph, (x, gain, offset, eps, *outputs))


def _execute(graph, tensors, buffers):
    import cudnn

    device = buffers[0].device
    workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)
    cudnn.set_stream(handle=_handle(), stream=torch.cuda.current_stream(device).cuda_stream)
    graph.execute(dict(zip(tensors, buffers)), workspace, handle=_handle())
