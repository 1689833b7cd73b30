"""Puts recipes/ on the path, as running a recipe does, and shares one tiny pipeline among its tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))


@pytest.fixture(scope="session")
def tiny_pipeline(tmp_path_factory) -> Path:
    from tiny_wan import save_tiny_wan

    return save_tiny_wan(tmp_path_factory.mktemp("tiny_wan"))
