"""Puts recipes/ on the path, as running a recipe does, and shares tiny pipelines among its tests."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))


@pytest.fixture(scope="session")
def tiny_pipeline(tmp_path_factory) -> Path:
    from tiny_wan import save_tiny_wan

    return save_tiny_wan(tmp_path_factory.mktemp("tiny_wan"))


@pytest.fixture(scope="session")
def small_pipeline(tiny_pipeline, tmp_path_factory) -> Path:
    """The tiny one with a transformer that trains ten times as fast."""
    from support.train_ranks import save_small_transformer

    folder = shutil.copytree(tiny_pipeline, tmp_path_factory.mktemp("small_wan"), dirs_exist_ok=True)
    save_small_transformer(folder / "transformer")
    return folder
