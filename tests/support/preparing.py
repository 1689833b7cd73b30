"""Runs recipes/prepare_dataset.py by its own main, and reads what it wrote."""

import json
import sys
from pathlib import Path

BUCKETS = ["1x32x48", "5x32x48", "17x32x48"]


def run(monkeypatch, root, output, pipeline, *options, buckets=BUCKETS, fps="16"):
    """Runs the recipe's own main with a command line."""
    import prepare_dataset

    words = ["--instance_data_root", root, "--output_dir", output, "--pretrained_model_name_or_path", pipeline]
    words += ["--fps", fps, "--max_sequence_length", "48", *options, "--video_resolution_buckets", *buckets]
    monkeypatch.setattr(sys, "argv", ["prepare_dataset.py", *map(str, words)])
    prepare_dataset.main()


def report_of(output) -> dict:
    return json.loads((Path(output) / "prepare_report.json").read_text(encoding="utf-8"))
