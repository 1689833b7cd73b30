"""Puts recipes/ on the path, as running a recipe does, and shares tiny pipelines and data among its tests."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

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


@pytest.fixture(scope="module")
def setup(small_pipeline, tmp_path_factory) -> SimpleNamespace:
    """What a trainer is given: a pipeline, a prepared dataset of COUNTS, its bucket config, and a folder for runs."""
    from support.prepared import save_config, save_prepared
    from support.train_ranks import COUNTS

    folder = tmp_path_factory.mktemp("training")
    return SimpleNamespace(
        pipeline=small_pipeline,
        dataset=save_prepared(folder / "prepared", COUNTS),
        config=save_config(folder / "config", COUNTS),
        folder=folder,
    )
