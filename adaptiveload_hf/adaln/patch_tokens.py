"""How do the patches of a video or image become tokens in one matrix product, where a model calls a convolution?"""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

from .onlookers import is_transformed, no_hooks_on

# The convolution that makes tokens of patches gives them as [B, D, F, H, W], which the model copies into [B, S, D];
# backward copies them back. Each of these copies costs more than a pass of a fused op over the stream.
_CONVOLUTIONS = {kind: kind.forward for kind in (nn.Conv2d, nn.Conv3d)}


def patch_tokens(convolution: nn.Module, x: Tensor) -> Tensor:
    """convolution(x) as tokens [B, S, D], up to rounding. On a GPU as a product, where `is_product` allows it, but not
    in float32: whether convolutions and products are computed in TF32 are two settings."""
    lowered = x.is_cuda and (x.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled("cuda"))
    if lowered and is_product(convolution, x):
        return product_of_patches(convolution, x)
    return convolution(x).flatten(2).transpose(1, 2).contiguous()


def product_of_patches(convolution: nn.Module, x: Tensor) -> Tensor:
    """A convolution of patches that do not overlap, [B, C, ...], as one matrix product of them: [B, S, D]."""
    sizes = [(length // step, step) for length, step in zip(x.shape[2:], convolution.kernel_size)]
    patches = x.reshape(*x.shape[:2], *itertools.chain(*sizes))
    patches = patches.permute(0, *range(2, patches.ndim, 2), 1, *range(3, patches.ndim, 2))
    weight = convolution.weight.flatten(1)
    return functional.linear(patches.reshape(x.shape[0], -1, weight.shape[1]), weight, convolution.bias)


def is_product(convolution: nn.Module, x: Tensor) -> bool:
    """Whether `product_of_patches` gives what calling a convolution does: its patches cover x once, and nothing is
    hooked on it or stands in its place."""
    kind = type(convolution)
    if _CONVOLUTIONS.get(kind, ...) is not kind.forward or not no_hooks_on(convolution) or is_transformed():
        return False
    weight, size = convolution.weight, convolution.kernel_size
    return (
        type(weight) is nn.Parameter
        and convolution.stride == size
        and convolution.dilation == (1,) * len(size)
        and convolution.groups == 1
        and not any(convolution.padding)
        and x.ndim == weight.ndim
        and x.shape[1] == weight.shape[1]
        and x.numel() > 0
        and all(length % step == 0 for length, step in zip(x.shape[2:], size))
    )
