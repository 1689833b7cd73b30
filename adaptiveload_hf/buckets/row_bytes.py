"""Where do the bytes of a micro-batch's rows lie, so that stacking them copies nothing?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils.data import get_worker_info


def zero_rows(count: int, size: int) -> torch.Tensor:
    """Zeros [count, size] of uint8; in a worker they lie in memory that the training process shares.

    New memory is zero without being written, and what a caption does not fill stays so: the first touch of new pages
    is what reading is bound by (2 GB/s in shared memory, where copies into old pages run at 14).
    """
    if get_worker_info() is None:
        return torch.from_numpy(np.zeros((count, size), np.uint8))  # not written either, as torch.zeros would
    storage = torch.UntypedStorage._new_shared(count * size)  # as torch's own default_collate has it
    return torch.empty(0, dtype=torch.uint8).set_(storage).resize_(count, size)


@dataclass
class RowMemory:
    """Memory for the tensors of several rows, in which those that can share a micro-batch follow each other.

    counts: rows by bucket.
    """

    counts: dict[tuple, int]
    _free: dict[tuple, Iterator[torch.Tensor]] = field(default_factory=dict)

    def take(self, bucket: tuple, name: str, dtype: str, size: int) -> torch.Tensor:
        """Zeros [size] of uint8 for the tensor `name` of the next row of a bucket."""
        kind = (bucket, name, dtype, size)
        if kind not in self._free:
            self._free[kind] = iter(zero_rows(self.counts[bucket], size))
        return next(self._free[kind])


def stack_bytes(parts: list[bytes | bytearray | torch.Tensor]) -> torch.Tensor:
    """Equally long parts as one [B, size] of uint8: without a copy if they are rows of one `RowMemory`, in order."""
    first, size = parts[0], len(parts[0])
    if isinstance(first, torch.Tensor):
        memory, start = first.untyped_storage().data_ptr(), first.storage_offset()
        if all(
            isinstance(part, torch.Tensor)
            and part.untyped_storage().data_ptr() == memory
            and part.storage_offset() == start + position * size
            for position, part in enumerate(parts)
        ):
            return first.as_strided((len(parts), size), (size, 1))
    stacked = zero_rows(len(parts), size)
    for place, part in zip(stacked.numpy(), parts):
        place[:] = part if isinstance(part, torch.Tensor) else np.frombuffer(part, dtype=np.uint8)
    return stacked
