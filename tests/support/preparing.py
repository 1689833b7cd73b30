"""Runs recipes/prepare_dataset.py by its own main, and reads what it wrote."""

import json
import sys
from pathlib import Path

import torch

BUCKETS = ["1x32x48", "5x32x48", "17x32x48"]


def arguments_of(root, output, pipeline, *options, buckets=BUCKETS, fps="16") -> list:
    """A command line; without a root, the options give the source."""
    words = ["--output_dir", output, "--pretrained_model_name_or_path", pipeline]
    words += ["--instance_data_root", root] if root else []
    return [*words, "--fps", fps, "--max_sequence_length", "48", *options, "--video_resolution_buckets", *buckets]


def run(monkeypatch, root, output, pipeline, *options, **more):
    """Runs the recipe's own main with a command line."""
    import prepare_dataset

    words = arguments_of(root, output, pipeline, *options, **more)
    monkeypatch.setattr(sys, "argv", ["prepare_dataset.py", *map(str, words)])
    prepare_dataset.main()


def report_of(output) -> dict:
    return json.loads((Path(output) / "prepare_report.json").read_text(encoding="utf-8"))


def tensor_of(row, name) -> torch.Tensor:
    assert row[f"{name}_dtype"] == "bfloat16"
    return row[name].view(torch.bfloat16).view(row[f"{name}_shape"])


def rows_of(dataset) -> list[dict]:
    """All rows, with tensors as lists, which can be compared."""
    return [
        {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in row.items()}
        for row in dataset
    ]
