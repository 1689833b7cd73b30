"""Blocks that modulate in a helper, as a third party may write them."""

import torch
from torch import nn


def modulated(x, shift, scale):
    return x * (1 + scale) + shift


def rows(modulation):
    return modulation[:, None].chunk(3, dim=-1)


class HelperBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8, elementwise_affine=False)
        self.ff = nn.Linear(8, 8)
        self.modulation = nn.Linear(4, 24)

    def modulate(self, x, modulation):
        shift, scale, gate = modulation[:, None].chunk(3, dim=-1)
        return x * (1 + scale) + shift, gate

    def forward(self, x, temb):
        normed, gate = self.modulate(self.norm(x), self.modulation(temb))
        return x + gate * self.ff(normed)


class OtherHelper(HelperBlock):
    def modulate(self, x, modulation):
        normed, gate = super().modulate(x, modulation)
        return normed * 2, gate


class GlobalHelperBlock(HelperBlock):
    def forward(self, x, temb):
        shift, scale, gate = rows(self.modulation(temb))
        return x + gate * self.ff(modulated(self.norm(x), shift, scale))


def inputs():
    torch.manual_seed(1)
    return torch.randn(2, 5, 8), torch.randn(2, 4)
