"""Which data does a run train on, in which micro-batches, and for how many optimizer steps?"""

from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from accelerate import Accelerator

from adaptiveload_hf import BucketConfig, BucketDataLoader, LatentShape, UserError


def make_loader(
    accelerator: Accelerator, args, dataset, bucket_config: BucketConfig, checkpoint: Path | None
) -> tuple[BucketDataLoader, int]:
    """The loader, where the checkpoint left it, and the optimizer steps of the whole run.

    Args:
        args: of `add_model_arguments` and `add_run_arguments`.
        dataset: from `load_prepared`.
    """
    loader = BucketDataLoader(
        dataset,
        bucket_config,
        accelerator=accelerator,
        num_workers=args.dataloader_num_workers,
        seed=args.seed,
        on_dataset_change=args.on_dataset_change,
        repeats=parse_repeats(args.repeats, dataset),
        balance=args.balance,
        loss_normalization=args.loss_normalization,
        memory_limit_gib=args.memory_limit_gib,
        allow_extrapolation=args.allow_extrapolation,
        batch_sizes=parse_batch_sizes(args.batch_sizes),
    )
    if checkpoint is not None:
        loader.load_checkpoint(checkpoint)  # other ranks or another plan leave another number of steps
    return loader, args.max_train_steps or loader.global_step_after(args.num_train_epochs)


def check_columns(dataset, names: list[str]) -> None:
    """Refuses a dataset that lacks any of these columns, such as one of pictures and captions.

    Raises:
        UserError: naming the columns that are missing and those that are there.
    """
    missing = [name for name in names if name not in dataset.column_names]
    if missing:
        raise UserError(
            f"the dataset has no column {' and no '.join(missing)}, but {', '.join(dataset.column_names)}. "
            "Prepare one with recipes/prepare_dataset.py and this pipeline."
        )


def check_widths(transformer_config: dict, *widths: tuple[int, str, str]) -> None:
    """Refuses a dataset that was prepared for another transformer.

    Args:
        widths: the one found, the name of the transformer's own in its configuration, and of what.

    Raises:
        UserError: naming both widths.
    """
    for found, name, what in widths:
        if found != transformer_config[name]:
            raise UserError(
                f"the transformer takes {what} of width {transformer_config[name]} ({name}), but the dataset holds "
                f"width {found}. Prepare the dataset with this pipeline."
            )


def parse_repeats(words: list[str] | None, dataset) -> np.ndarray | None:
    """How often each sample occurs in an epoch, float [samples]: `["photos/*=0.5"]` takes half of those files.

    The last pattern that fits a sample's `file` counts, and without any it occurs once.

    Raises:
        UserError: a word of another form, a pattern that fits no file, or a dataset without their names.
    """
    if words is None:
        return None
    check_columns(dataset, ["file"])
    files = dataset.select_columns(["file"])["file"]
    repeats = np.ones(len(files))
    for word in words:
        pattern, _, number = word.rpartition("=")
        try:
            times = float(number)
        except ValueError:
            times = -1.0
        if not pattern or not 0 <= times < float("inf"):
            raise UserError(f"--repeats is written PATTERN=N, such as 'photos/*=0.5', but found {word!r}.")
        fits = [fnmatchcase(file, pattern) for file in files]
        if not any(fits):
            raise UserError(
                f"--repeats {word}: no file of the dataset fits {pattern!r}; they are named like {files[0]!r}."
            )
        repeats[fits] = times
    return repeats


def parse_batch_sizes(words: list[str] | None) -> dict[str, int] | None:
    """`["21x60x104=1"]` as `{"21x60x104": 1}`.

    Raises:
        UserError: a word of another form.
    """
    if words is None:
        return None
    sizes = {}
    for word in words:
        shape, _, size = word.partition("=")
        if not size.isdecimal() or int(size) < 1:
            raise UserError(
                f"a batch size is written SHAPE=B, with B from 1 on, such as 21x60x104=1, but found {word!r}."
            )
        sizes[str(LatentShape.parse(shape))] = int(size)
    return sizes
