"""With which of Inductor's options does torch.compile compute right gradients?"""

import torch


def correct_options() -> dict[str, bool]:
    """Without what computes wrong gradients of modulation tables: pytorch#193061, on by default since torch 2.10."""
    return {name: False for name in torch._inductor.list_options() if name == "triton.mix_order_reduction"}
