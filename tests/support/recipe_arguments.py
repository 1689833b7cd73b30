"""The command line of a trainer, parsed, for tests of its parts."""

import argparse
import importlib


def parse(pipeline, *extra, recipe="train_wan") -> argparse.Namespace:
    """All arguments at their defaults but for `extra`."""
    required = ["--pretrained_model_name_or_path", pipeline, "--dataset", "D", "--output_dir", "O"]
    return importlib.import_module(recipe).parse_args(list(map(str, [*required, "--bucket_config", "C", *extra])))
