"""More odd blocks (see `odd_blocks`): casts around a norm, rows of its result, a 1 that was added before."""

import torch
from torch import nn

from .odd_blocks import OddBlock


class CastToNormed(OddBlock):
    reason = "x is used otherwise too"

    def forward(self, x, scale, shift, gate):
        x = x.bfloat16()
        x = self.norm(x.float())
        x = (x * (1 + scale) + shift).type_as(x)
        return x + gate


class DtypeReboundBetween(OddBlock):
    fused = 1

    def forward(self, x, scale, shift, gate):
        other = x.double()
        normed = self.norm(x.float()).to(dtype=other.dtype)
        other = x.half()
        return normed * (1 + scale) + shift + other


class DeviceOfNorm(OddBlock):
    fused = 1

    def forward(self, x, scale, shift, gate):
        x = self.norm(x)
        scale = scale.to(x.device)
        return x * (1 + scale) + shift.to(x.device)


class DeviceOfNormLater(OddBlock):
    reason = "normed is used otherwise too"

    def forward(self, x, scale, shift, gate):
        normed = self.norm(x)
        x = normed * (1 + scale) + shift
        return x.to(normed.device) + gate


class DeviceOfProduct(OddBlock):
    reason = "branch is used otherwise too"

    def forward(self, x, scale, shift, gate):
        branch = gate * self.linear(x)
        x = x.to(branch.device)
        return x + branch


class ShiftAlone(OddBlock):
    fused = 1

    def forward(self, x, scale, shift, gate):
        return gate + (self.norm(x) + shift)


class ShiftWithAnEffect(OddBlock):
    reason = "self.relu(shift * 1) may have an effect"

    def forward(self, x, scale, shift, gate):
        return self.norm(x) + self.relu(shift * 1)


class RowsOfNorm(OddBlock):
    fused = 2

    def forward(self, x, scale, shift, gate):
        normed = self.norm(x)
        first = normed[:, :2] * (1 + scale) + shift
        rest = normed[:, 2:] * (1 + gate)
        return torch.cat([first, rest], dim=1)


class RowsMovedBetween(OddBlock):
    fused = 2

    def forward(self, x, scale, shift, gate):
        count = 1
        normed = self.norm(x)
        first = normed[:, :count] * (1 + scale) + shift
        count = 3
        rest = normed[:, count:] * (1 + scale) + shift
        return torch.cat([first, rest], dim=1)


class RowsOfRowsOfNorm(OddBlock):
    reason = "it modulates no result of a known norm"

    def forward(self, x, scale, shift, gate):
        normed = self.norm(x)
        return normed[:, ::2] * (1 + scale) + shift


class RowsEditedBetween(OddBlock):
    reason = "x may be changed in place later"

    def forward(self, x, scale, shift, gate):
        x = x.detach().clone()
        normed = self.norm(x)
        first = normed[:, :2] * (1 + scale) + shift
        x[:, 2:] = 0
        rest = normed[:, 2:] * (1 + scale) + shift
        return torch.cat([first, rest], dim=1)


class OneAddedBefore(OddBlock):
    fused = 1

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(8, eps=1e-6)

    def forward(self, x, scale, shift, gate):
        scale = 1 + scale
        return self.norm(x) * scale + gate


class OneAddedBeforeLayerNorm(OddBlock):
    reason = "its op adds the 1 to the scale itself"

    def forward(self, x, scale, shift, gate):
        scale = 1 + scale
        return self.norm(x) * scale + gate


class BranchBetween(OddBlock):
    fused = 1

    def forward(self, x, scale, shift, gate):
        normed = self.norm(x)
        if scale.shape[1] == 1:
            scale, shift = (part * 2 for part in (scale, shift))
        return normed * (1 + scale) + shift


class BranchEditsBetween(OddBlock):
    reason = "may be changed in between"

    def forward(self, x, scale, shift, gate):
        x = x.detach().clone()
        normed = self.norm(x)
        if self.calls == 0:
            x.mul_(2)
        return normed * (1 + scale) + shift


class BranchReadsNorm(OddBlock):
    reason = "normed is also read outside the basic block that computes it"

    def forward(self, x, scale, shift, gate):
        normed = self.norm(x)
        if self.calls == 0:
            gate = gate + normed
        return normed * (1 + scale) + shift + gate


class LoopBetween(OddBlock):
    reason = "normed is also read outside the basic block that computes it"

    def forward(self, x, scale, shift, gate):
        normed = self.norm(x)
        for _ in range(2):
            shift = shift + 1
        return normed * (1 + scale) + shift


class ReturnBetween(OddBlock):
    fused = 1

    def forward(self, x, scale, shift, gate):
        normed = self.norm(x)
        if self.calls:
            return x
        return normed * (1 + scale) + shift


class OneRowForAll(OddBlock):
    fused = 2

    def forward(self, x, scale, shift, gate):
        x = self.norm(x) * (1 + scale[0, 0]) + shift[0]
        return x + gate[0] * self.linear(x)


class TableBlock(OddBlock):
    """Not odd itself: `scale_table`, as in Wan, is added to the modulation of every token."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 8))


class Tables(TableBlock):
    fused = 2

    def forward(self, x, scale, shift, gate):
        shift_table, scale_table, gate_table = self.table.unbind(0)
        y = self.norm(x) * (1 + (scale + scale_table)) + (shift + shift_table)
        return x + self.linear(y) * (gate + gate_table)


class TablesInHalf(TableBlock):
    fused = 2

    def forward(self, x, scale, shift, gate):
        scale_table, gate_table = self.table[0], self.table[1]
        scale, gate = scale.half(), gate.half()
        y = (self.norm(x.float()) * (1 + (scale.float() + scale_table)) + shift).type_as(x)
        y = self.linear(y)
        return (x.float() + y.float() * (gate.float() + gate_table)).type_as(x)


class TableEditedBetween(TableBlock):
    reason = "may be changed in between"

    def forward(self, x, scale, shift, gate):
        table = self.table.detach().clone()
        gate = gate.detach()
        product = self.linear(x).detach() * (gate + table[2])
        table.zero_()
        return x + product


class TableOfAnotherShape(TableBlock):
    fused = 2

    def forward(self, x, scale, shift, gate):
        scale_table = self.table[:1]
        y = self.norm(x) * (1 + (scale + scale_table)) + shift
        return x + gate * y


class TableOfRmsNorm(TableBlock):
    fused = 1

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(8, eps=1e-6)

    def forward(self, x, scale, shift, gate):
        return self.norm(x) * (1 + (scale + self.table[0])) + shift


ODD_NORMS = [
    cls
    for cls in list(globals().values())
    if isinstance(cls, type) and issubclass(cls, OddBlock) and "forward" in vars(cls)
]
