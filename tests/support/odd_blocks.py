"""Blocks that look as if they could be rewritten, and must not be, or only with care. Each is right as it stands.

`forward(x, scale, shift, gate)`; `fused` is the number of sites that may be fused, `reason` what the report must say
of the others.
"""

import torch
from torch import nn


class OddBlock(nn.Module):
    fused = 0
    reason = ""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8, elementwise_affine=False)
        self.linear = nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)
        self.calls = 0


class InPlaceBetween(OddBlock):
    reason = "x may be changed in between"

    def forward(self, x, scale, shift, gate):
        x = x.detach().clone()
        normed = self.norm(x)
        x.add_(1)
        return normed * (1 + scale) + shift + x


class SliceStoreBetween(OddBlock):
    reason = "x may be changed in between"

    def forward(self, x, scale, shift, gate):
        x = x.detach().clone()
        normed = self.norm(x)
        x[:, :1] = 0
        return normed * (1 + scale) + shift + x


class AugmentedBetween(OddBlock):
    reason = "x may be changed in between"

    def forward(self, x, scale, shift, gate):
        x = x.detach().clone()
        normed = self.norm(x)
        x += 1
        return normed * (1 + scale) + shift


class ViewBetween(OddBlock):
    reason = "view may be changed in between"

    def forward(self, x, scale, shift, gate):
        x = x.detach().clone()
        view = x.flatten(0, 1)
        normed = self.norm(x)
        view.mul_(2)
        return normed * (1 + scale) + shift


class OutBetween(OddBlock):
    reason = "may be changed in between"

    def forward(self, x, scale, shift, gate):
        x = x.detach().clone()
        normed = self.norm(x)
        torch.add(x, 1, out=x)
        return normed * (1 + scale) + shift


class ModuleBetween(OddBlock):
    reason = "x may be changed in between"

    def forward(self, x, scale, shift, gate):
        x = x.detach().clone()
        normed = self.norm(x)
        self.relu(x)
        return normed * (1 + scale) + shift


class GradModeBetween(OddBlock):
    reason = "torch.set_grad_enabled(), which may have any effect, is called in between"

    def forward(self, x, scale, shift, gate):
        before = torch.is_grad_enabled()
        normed = self.norm(x)
        torch.set_grad_enabled(False)
        x = normed * (1 + scale) + shift
        torch.set_grad_enabled(before)
        return x + gate


class NormUsedAfterLoop(OddBlock):
    reason = "normed is also read outside the basic block that computes it"

    def forward(self, x, scale, shift, gate):
        for _ in range(2):
            normed = self.norm(x)
            x = normed * (1 + scale) + shift
        return x + normed


class NormUsedByHandler(OddBlock):
    reason = "normed is also read outside the basic block that computes it"

    def forward(self, x, scale, shift, gate):
        try:
            normed = self.norm(x)
            normed = normed * (1 + scale) + shift
            normed = normed + torch.zeros(3)
        except RuntimeError:
            return normed
        return x


class NormUsedTwice(OddBlock):
    reason = "normed is used otherwise too"

    def forward(self, x, scale, shift, gate):
        normed = self.norm(x)
        x = normed * (1 + scale) + shift
        return x + normed


class NormReadByClosure(OddBlock):
    reason = "normed is also read outside the basic block that computes it"

    def forward(self, x, scale, shift, gate):
        def peek():
            return normed

        normed = self.norm(x)
        x = normed * (1 + scale) + shift
        return x + peek()


class NormShadowedByComprehension(OddBlock):
    reason = "is used otherwise too"

    def forward(self, x, scale, shift, gate):
        normed = self.norm(x)
        count = sum(0 for normed in range(3))
        x = normed * (1 + scale) + shift
        return x + normed + count


class NormAssignedWithin(OddBlock):
    reason = "normed is also assigned within an expression"

    def forward(self, x, scale, shift, gate):
        normed = self.norm(x)
        x = x + (normed := x * 2)
        return normed * (1 + scale) + shift + x


class LooksAtFrame(OddBlock):
    reason = "its forward uses locals()"

    def forward(self, x, scale, shift, gate):
        normed = self.norm(x)
        y = normed * (1 + scale) + shift
        return y + locals()["normed"]


class InputEditedLater(OddBlock):
    reason = "x may be changed in place later"

    def forward(self, x, scale, shift, gate):
        x = x.bfloat16()
        y = (self.norm(x.float()) * (1 + scale) + shift).type_as(x)
        x.mul_(3)
        return (x + y).float()


class BranchEditedLater(OddBlock):
    reason = "may be changed in place later"

    def forward(self, x, scale, shift, gate):
        x, y = x.bfloat16(), self.linear(x).bfloat16()
        out = (x.float() + y.float() * gate).type_as(x)
        y.mul_(3)
        return (out + y).float()


class EditedInNextRound(OddBlock):
    reason = "may be changed in place later"

    def forward(self, x, scale, shift, gate):
        x = out = x.detach().clone()
        for _ in range(2):
            x.mul_(2)
            out = out + self.norm(x) * (1 + scale) + shift
        return out


class BranchChangedBetween(OddBlock):
    reason = "may be changed in between"

    def forward(self, x, scale, shift, gate):
        y = self.linear(x).detach()
        product = gate.detach() * y
        y.zero_()
        return x + product


class ProductReadInNextRound(OddBlock):
    reason = "product is also read outside the basic block that computes it"

    def forward(self, x, scale, shift, gate):
        product = x
        for _ in range(2):
            product = gate * product
            x = x + product
        return x


class CastBeforeBranch(OddBlock):
    reason = "x is cast before its branch is computed"

    def forward(self, x, scale, shift, gate):
        x = x.detach().half()
        return (x.float() + gate * self.relu(x)).type_as(x).float()


class EffectInOperand(OddBlock):
    reason = "self.linear(scale) may have an effect"

    def forward(self, x, scale, shift, gate):
        return self.norm(x) * (1 + self.linear(scale)) + shift


class InputReboundBetween(OddBlock):
    fused = 1

    def forward(self, x, scale, shift, gate):
        normed = self.norm(x)
        x = x * 2
        y = normed * (1 + scale) + shift
        return x + y


class StreamReboundByFirstUse(OddBlock):
    fused = 2

    def forward(self, x, scale, shift, gate):
        normed = self.norm(x)
        x = normed * (1 + scale) + shift
        y = normed * (1 + gate) + shift
        return x * y


class BranchCalledOnce(OddBlock):
    fused = 1

    def count(self, x):
        self.calls += 1
        return self.linear(x)

    def forward(self, x, scale, shift, gate):
        return x + gate.tanh() * self.count(x)


class HeldInLoop(OddBlock):
    fused = 2

    def forward(self, x, scale, shift, gate):
        for _ in range(2):
            normed = self.norm(x)
            normed = normed * (1 + scale) + shift
            product = self.linear(normed) * gate
            x = x + product
        return x


class LazyBranch(OddBlock):
    fused = 1

    def forward(self, x, scale, shift, gate):
        return x if self.calls else x + gate * self.linear(x)


class NormAfterNorm(OddBlock):
    fused = 2

    def forward(self, x, scale, shift, gate):
        first = self.norm(x)
        second = self.norm(x * 2)
        first = first * (1 + scale) + shift
        second = second * (1 + scale) + shift
        return first + second


class Private(OddBlock):
    fused = 2

    def __init__(self):
        super().__init__()
        self.__norm = nn.LayerNorm(8)

    def forward(self, x, scale, shift, gate):
        __normed = self.__norm(x)
        x = __normed * (1 + scale) + shift
        return x + gate * self.linear(x)


class ZeroArgumentSuper(OddBlock):
    reason = "its forward closes over __class__"

    def extra_repr(self):
        return super().extra_repr()

    def forward(self, x, scale, shift, gate):
        super().extra_repr()
        return self.norm(x) * (1 + scale) + shift


class NamesItself(OddBlock):
    fused = 1

    def forward(self, x, scale, shift, gate):
        assert isinstance(self, NamesItself)
        return self.norm(x) * (1 + scale) + shift * NamesItself.fused


class EditedByGenerator(OddBlock):
    reason = "may be changed in place later"

    def forward(self, x, scale, shift, gate):
        x = x.bfloat16()
        edits = (x.mul_(3) for _ in range(1))
        y = (self.norm(x.float()) * (1 + scale) + shift).type_as(x)
        return (next(edits) + y).float()


class NormReadByGenerator(OddBlock):
    reason = "normed is also read outside the basic block that computes it"

    def forward(self, x, scale, shift, gate):
        reads = (normed for _ in range(1))  # noqa: F821
        normed = self.norm(x)
        x = normed * (1 + scale) + shift
        return x + next(reads)


class ShadowedTorch(OddBlock):
    reason = "torch.tanh(scale) may have an effect"

    def forward(self, x, scale, shift, gate, torch=torch):
        return self.norm(x) * (1 + torch.tanh(scale)) + shift


class AttributeAssignedBetween(OddBlock):
    reason = "an attribute is assigned in between"

    def forward(self, x, scale, shift, gate):
        normed = self.norm(x)
        self.norm = nn.LayerNorm(8, eps=1.0)
        x = normed * (1 + scale) + shift
        self.norm = nn.LayerNorm(8, elementwise_affine=False)
        return x


class OwnPrefix(OddBlock):
    reason = "its forward uses names that begin with _adaln"

    def forward(self, x, scale, shift, gate):
        _adaln = self.norm(x) * (1 + scale) + shift
        return _adaln * 2


ODD_BLOCKS = [cls for cls in list(globals().values()) if isinstance(cls, type) and OddBlock in cls.__bases__]
