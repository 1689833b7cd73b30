"""What is a prepared model without what DDP, activation checkpointing and torch.compile have wrapped around it?"""

import torch
from accelerate import Accelerator


def unwrapped(accelerator: Accelerator, model) -> torch.nn.Module:
    """The transformer itself; by default accelerate leaves the launch configuration's `dynamo_backend` around it."""
    return accelerator.unwrap_model(model, keep_torch_compile=False)


def plain_name(name: str) -> str:
    """A parameter's name in the transformer itself."""
    for wrapper in ("_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def whole_state_dict(accelerator: Accelerator, model) -> dict[str, torch.Tensor]:
    """All weights by their plain names, gathered from the ranks: a collective. Under FSDP2 empty but on rank 0."""
    return {plain_name(name): value for name, value in accelerator.get_state_dict(model).items()}
