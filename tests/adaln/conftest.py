"""Keeps the matrix of docs/patching.md and the tests of compositions in step."""

import pytest
from support import compositions

_recorded = pytest.StashKey[dict]()


def pytest_configure(config):
    config.stash[_recorded] = {}


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
