"""Keeps the matrix of docs/patching.md in step with its tests, and shares how tests of CUDA kernels begin."""

import pytest
import torch
from support import compositions

from adaptiveload_hf.adaln import ops, registry

_recorded = pytest.StashKey[dict]()


def pytest_configure(config):
    config.stash[_recorded] = {}


@pytest.fixture
def cuda_kernels():
    """The extension is there, and random numbers are the same in every run."""
    if ops.kernel_backend("cuda") != "cuda":
        pytest.skip(f"the extension is missing: {ops.extension_missing_reason()}")
    torch.manual_seed(0)


@pytest.fixture
def op_calls(monkeypatch):
    """The names of the fused ops as they run."""
    calls, original = [], registry.call

    def counted(name, *args):
        calls.append(name)
        return original(name, *args)

    monkeypatch.setattr(registry, "call", counted)
    return calls


@pytest.fixture
def record(request):
    """`record(row, cells)`: what a test found for a row of the matrix, which must be what the docs say."""

    def record_cells(row, cells):
        assert row in compositions.ROWS
        if request.config.getoption("--write-matrix"):
            request.config.stash[_recorded].setdefault(row, {}).update(cells)
            return
        stated = compositions.documented().get(row, {})
        stale = {column: cell for column, cell in cells.items() if stated.get(column) != cell}
        assert not stale, f"docs/patching.md is out of date for {row!r}, now {stale}: run pytest --write-matrix"

    return record_cells


def pytest_sessionfinish(session):
    recorded = session.config.stash.get(_recorded, {})
    if recorded:
        compositions.write_matrix(recorded)
