"""The command line of recipes/train_wan.py, parsed, for tests of its parts."""

import argparse


def parse(pipeline, *extra) -> argparse.Namespace:
    """All arguments at their defaults but for `extra`."""
    import train_wan

    required = ["--pretrained_model_name_or_path", pipeline, "--dataset", "D", "--output_dir", "O"]
    return train_wan.parse_args(list(map(str, [*required, "--bucket_config", "C", *extra])))
