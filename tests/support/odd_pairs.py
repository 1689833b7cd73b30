"""Blocks in which a residual and a norm of it are, or only seem to be, one after the other.

`forward(x, scale, shift, gate)`; `pairs` is the number that may be fused, `reason` what the report must say of others.
"""

import torch
from torch import nn


class PairBlock(nn.Module):
    pairs = 0
    reason = ""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.other = nn.LayerNorm(8, elementwise_affine=False)
        self.linear = nn.Linear(8, 8)
        self.calls = []

    def branch(self, x):
        self.calls.append("branch")
        return self.linear(x)

    def note(self, *_):
        self.calls.append("note")


class Adjacent(PairBlock):
    pairs = 1

    def forward(self, x, scale, shift, gate):
        x = x + gate * self.branch(x)
        y = self.norm(x) * (1 + scale) + shift
        return x + gate * y


class Held(PairBlock):
    pairs = 1

    def forward(self, x, scale, shift, gate):
        y = gate * self.branch(x)
        x = x + y
        normed = self.norm(x)
        normed = normed * (1 + scale) + shift
        return x + normed


class TwoStreams(PairBlock):
    pairs = 2

    def forward(self, x, scale, shift, gate):
        y = self.branch(x)
        a = x + y * gate
        b = y + x * gate
        normed_a = self.norm(a)
        normed_b = self.other(b)
        normed_a = normed_a * (1 + scale) + shift
        normed_b = normed_b * (1 + shift) + scale
        return a + b + normed_a * normed_b


class PlainSum(PairBlock):
    pairs = 1

    def forward(self, x, scale, shift, gate):
        x = x + self.branch(x)
        return x * 0.5 + self.norm(x.float()).type_as(x)


class SumOfBranches(PairBlock):
    pairs = 1

    def forward(self, x, scale, shift, gate):
        y = self.linear(self.branch(x)) + self.branch(x + 1)
        return self.norm(y) * (1 + scale) + shift


class SumThatBroadcasts(PairBlock):
    pairs = 1  # by its form: what is added has one row, so that the call runs as written

    def forward(self, x, scale, shift, gate):
        x = x + gate
        return x * (self.norm(x) * (1 + scale) + shift)


class InLoop(PairBlock):
    pairs = 1

    def forward(self, x, scale, shift, gate):
        for _ in range(2):
            x = x + gate * self.branch(x)
            y = self.norm(x) * (1 + scale) + shift
            x = x + gate * y
        return x


class ReadBetween(PairBlock):
    pairs = 1

    def forward(self, x, scale, shift, gate):
        x = x + gate * self.branch(x)
        first = x[:, :1]
        return (self.norm(x) * (1 + scale) + shift) * first


class NormOfAnother(PairBlock):
    def forward(self, x, scale, shift, gate):
        y = x + gate * self.branch(x)
        return y + (self.norm(x) * (1 + scale) + shift)


class ChangedAfterSum(PairBlock):
    def forward(self, x, scale, shift, gate):
        x = x + gate * self.branch(x)
        x = x * 2
        return self.norm(x) * (1 + scale) + shift


class SumIsAModulation(PairBlock):
    def forward(self, x, scale, shift, gate):
        x = self.other(x) * (1 + scale) + shift
        return self.norm(x) * (1 + scale) + gate


class InPlaceBetween(PairBlock):
    reason = "x may be changed in between"

    def forward(self, x, scale, shift, gate):
        x = x + gate * self.branch(x)
        x.mul_(2)
        return self.norm(x) * (1 + scale) + shift


class ViewInPlaceBetween(PairBlock):
    reason = "may be changed in between"

    def forward(self, x, scale, shift, gate):
        x = x + gate * self.branch(x)
        view = x.flatten(1)
        view[:, 0] = 3
        return self.norm(x) * (1 + scale) + shift


class ScaleReboundBetween(PairBlock):
    reason = "scale is assigned after the residual"

    def forward(self, x, scale, shift, gate):
        x = x + gate * self.branch(x)
        scale = scale * 2
        return self.norm(x) * (1 + scale) + shift


class ScaleInPlaceBetween(PairBlock):
    reason = "scale may be changed in between"

    def forward(self, x, scale, shift, gate):
        scale = scale * 1
        x = x + gate * self.branch(x)
        scale.mul_(2)
        return self.norm(x) * (1 + scale) + shift


class ScaleOfTheResidual(PairBlock):
    reason = "x is assigned after the residual"

    def forward(self, x, scale, shift, gate):
        x = x + gate * self.branch(x)
        return self.norm(x) * (1 + x[:, :1]) + shift


class CallBetween(PairBlock):
    reason = "may be changed in between"

    def forward(self, x, scale, shift, gate):
        x = x + gate * self.branch(x)
        self.note(x)
        return self.norm(x) * (1 + scale) + shift


class NormChangedBetween(PairBlock):
    reason = "self.norm may be changed in between"

    def note(self):
        with torch.no_grad():
            self.norm.weight.mul_(2)

    def forward(self, x, scale, shift, gate):
        x = x + gate * self.branch(x)
        self.note()
        return self.norm(x) * (1 + scale) + shift


class FunctionBetween(PairBlock):
    reason = "which may have any effect, is called in between"

    def forward(self, x, scale, shift, gate):
        x = x + gate * self.branch(x)
        torch.manual_seed(0)
        return self.norm(x) * (1 + scale) + shift


class OtherBlock(PairBlock):
    def forward(self, x, scale, shift, gate):
        x = x + gate * self.branch(x)
        if self.training:
            return self.norm(x) * (1 + scale) + shift
        return x


class BranchInBetween(PairBlock):
    def forward(self, x, scale, shift, gate):
        x = x + gate * self.branch(x)
        if self.training:
            x.mul_(2)
        return self.norm(x) * (1 + scale) + shift


class SecondSumInABranch(PairBlock):
    """As in SD3: whichever sum comes last is normalised."""

    pairs = 2
    taken = True

    def forward(self, x, scale, shift, gate):
        x = x + gate * self.branch(x)
        if self.taken:
            y = gate * self.branch(x)
            x = x + y
        normed = self.norm(x)
        normed = normed * (1 + scale) + shift
        return x * normed


class SecondSumInABranchNotTaken(SecondSumInABranch):
    taken = False
    forward = SecondSumInABranch.forward


class BranchScalesTheSum(PairBlock):
    pairs = 1

    def forward(self, x, scale, shift, gate):
        for is_taken in (True, False):
            x = x + gate * self.branch(x)
            if is_taken:
                x = x * 2
            x = self.norm(x) * (1 + scale) + shift
        return x


class BranchAssignsTheScale(PairBlock):
    reason = "scale is assigned after the residual"

    def forward(self, x, scale, shift, gate):
        x = x + gate * self.branch(x)
        if self.training:
            scale = scale * 2
            x = x * scale
        return self.norm(x) * (1 + scale) + shift


class BranchAssignsTheScaleOfBoth(PairBlock):
    reason = "the residual before the branch makes no pair"

    def forward(self, x, scale, shift, gate):
        x = x + gate * self.branch(x)
        if self.training:
            scale = scale * 2
            x = x + gate * scale
        return self.norm(x) * (1 + scale) + shift


class ConditionAssignedBetween(PairBlock):
    reason = "is_taken is assigned after the residual"

    def forward(self, x, scale, shift, gate):
        is_taken = False
        x = x + gate * self.branch(x)
        is_taken = True
        if is_taken:
            x = x * 2
        return self.norm(x) * (1 + scale) + shift


class ConditionWithAnEffect(PairBlock):
    def forward(self, x, scale, shift, gate):
        x = x + gate * self.branch(x)
        if self.note():
            x = x * 2
        return self.norm(x) * (1 + scale) + shift


class BranchWithElse(PairBlock):
    def forward(self, x, scale, shift, gate):
        x = x + gate * self.branch(x)
        if self.training:
            x = x + gate
        else:
            x = x * 2
        return self.norm(x) * (1 + scale) + shift


class BranchGoesOn(PairBlock):
    def forward(self, x, scale, shift, gate):
        x = x + gate * self.branch(x)
        if self.training:
            x = x + gate * self.branch(x)
            x.mul_(2)
        return self.norm(x) * (1 + scale) + shift


class OtherNormBetween(PairBlock):
    pairs = 1

    def forward(self, x, scale, shift, gate):
        y = x * 1
        x = x + gate * self.branch(x)
        y = self.other(y)
        return (self.norm(x) * (1 + scale) + shift) * y


class NormReadTwice(PairBlock):
    def forward(self, x, scale, shift, gate):
        x = x + gate * self.branch(x)
        normed = self.norm(x)
        return (normed * (1 + scale) + shift) * (normed * (1 + shift) + scale)


class SumCastToAnother(PairBlock):
    reason = "its residual is cast to another dtype"

    def forward(self, x, scale, shift, gate):
        x = (x.double() + gate * self.branch(x)).to(gate.dtype)
        return self.norm(x) * (1 + scale) + shift


class BranchSwapsTheNorm(PairBlock):
    """The norm that is called is the one after the branch has run, and the branch runs first."""

    pairs = 1

    def branch(self, x):
        self.norm = nn.LayerNorm(8, eps=1.0)
        return self.linear(x)

    def forward(self, x, scale, shift, gate):
        x = x + gate * self.branch(x)
        return self.norm(x) * (1 + scale) + shift


ODD_PAIRS = [cls for cls in list(globals().values()) if isinstance(cls, type) and issubclass(cls, PairBlock)][1:]
