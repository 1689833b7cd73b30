"""Does anything look on that a fused op would pass by: a transform of torch.func, a mode, a hook?"""

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.utils._device import DeviceContext


def is_transformed() -> bool:
    """Whether torch.func (grad, vmap, jvp), forward-mode AD or torch.jit.trace is at work, which the ops do not take,
    or a mode that must see the functions of torch that they stand for. Dynamo traces it another way."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return (
        forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or (torch._C._is_torch_function_mode_enabled() and _sees_functions())
    )


def _sees_functions() -> bool:
    """Whether a mode for torch's functions is on that does more than choose the device of new tensors."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any(type(mode) is not DeviceContext for mode in modes)


def no_hooks_on(*modules: nn.Module) -> bool:
    """Whether calling modules runs their class's forward and nothing else."""
    if (
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    ):
        return False
    for m in modules:
        own = m.__dict__  # older Dynamo does not trace vars(); an attribute of a module takes three times as long
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own
        ):
            return False
    return True
