"""Where in the output folder are rows, and how do they become the dataset at once?

They are in output_dir/dataset and, while a run is unfinished, in output_dir/unfinished: part-000000 and so on hold
rows that the dataset lacks; dataset is the next one; replaced is the last one, between two renames.
"""

import bisect
import os
import shutil
from pathlib import Path

import datasets
from fingerprints import described_rows, row_keys

from adaptiveload_hf.errors import UserError

FEATURES = datasets.Features(
    {
        "latent": datasets.Value("large_binary"),
        "latent_shape": datasets.List(datasets.Value("int32")),
        "latent_dtype": datasets.Value("string"),
        "latent_normalized": datasets.Value("bool"),
        "prompt_embeds": datasets.Value("large_binary"),
        "prompt_embeds_shape": datasets.List(datasets.Value("int32")),
        "prompt_embeds_dtype": datasets.Value("string"),
        "caption": datasets.Value("string"),
        "file": datasets.Value("string"),
        "fingerprint": datasets.Value("string"),
    }
)


class EarlierRows:
    """Rows on the disk, of the dataset that is there and of unfinished runs, found by what they were made of."""

    def __init__(self):
        self.tables, self.starts = [], []
        self.positions = {}  # row_keys -> row of all tables put together
        self.unsaved = {}  # row_keys -> a row that is not on the disk yet

    def add(self, table: datasets.Dataset):
        """Adds rows that are on the disk; what was remembered as unsaved is forgotten."""
        start = self.starts[-1] + len(self.tables[-1]) if self.tables else 0
        self.tables.append(table)
        self.starts.append(start)
        for position, row in enumerate(described_rows(table), start=start):
            for key in row_keys(row).values():
                self.positions.setdefault(key, position)
        self.unsaved.clear()

    def remember(self, row: dict):
        """Adds one row that is not on the disk yet; the next `add` is to bring it."""
        self.unsaved.update(dict.fromkeys(row_keys(row).values(), row))

    def position(self, row: dict) -> int | None:
        """Where this very row is in all tables put together."""
        return self.positions.get(row_keys(row)["row"])

    def tensor(self, name: str, row: dict) -> dict | None:
        """The columns of the row's latent or prompt_embeds, from any row that was made of the same."""
        key = row_keys(row)[name]
        columns = [name, f"{name}_shape", f"{name}_dtype"]
        if key in self.unsaved:
            return {column: self.unsaved[key][column] for column in columns}
        if key not in self.positions:
            return None
        number = bisect.bisect_right(self.starts, self.positions[key]) - 1
        return self.tables[number].select_columns(columns)[self.positions[key] - self.starts[number]]


def open_earlier(
    output_dir: Path, root: Path, files: list[str], overwrite: bool
) -> tuple[datasets.Dataset | None, EarlierRows]:
    """Finds the dataset that is in output_dir, and all rows there, those of unfinished runs too.

    Args:
        output_dir: may not be there yet.
        root: the folder of pictures and clips.
        files: its usable ones.
        overwrite: whether any other dataset may be replaced.

    Returns:
        The dataset, or None, and the rows.

    Raises:
        UserError: the dataset has none of these files, or is not of this recipe.
    """
    folder, work, earlier, dataset = output_dir / "dataset", output_dir / "unfinished", EarlierRows(), None
    if (work / "replaced").exists() and not folder.exists():
        os.replace(work / "replaced", folder)  # the last run ended between its two renames
    if folder.exists():
        dataset = datasets.load_from_disk(folder) if (folder / "state.json").exists() else None
        if dataset is None or "fingerprint" not in dataset.column_names:
            if not overwrite:
                raise UserError(
                    f"{folder} has no fingerprints: this version of the recipe did not make it, and cannot tell what "
                    "in it is up to date. Give another --output_dir, or --overwrite to encode everything anew."
                )
            dataset = None
        elif not overwrite and set(dataset["file"]).isdisjoint(files):
            raise UserError(
                f"{folder} has {len(dataset)} samples, but not one of their files can be used in "
                f"{root}. Give another --output_dir, or --overwrite to replace them."
            )
    parts = sorted(work.glob("part-*"))
    for table in ([dataset] if dataset is not None else []) + [datasets.load_from_disk(part) for part in parts]:
        earlier.add(table)
    return dataset, earlier


def save_part(rows: list[dict], work: Path) -> datasets.Dataset:
    unfinished, folder = work / "unfinished", work / f"part-{len(list(work.glob('part-*'))):06d}"
    shutil.rmtree(unfinished, ignore_errors=True)
    columns = {name: [row[name] for row in rows] for name in FEATURES}
    datasets.Dataset.from_dict(columns, features=FEATURES).save_to_disk(unfinished)
    os.replace(unfinished, folder)
    return datasets.load_from_disk(folder)


def save_dataset(output_dir: Path, order: list[int], earlier: EarlierRows) -> datasets.Dataset:
    """Saves these rows of all tables as unfinished/dataset; `replace_dataset` makes it the dataset."""
    folder = output_dir / "unfinished" / "dataset"
    shutil.rmtree(folder, ignore_errors=True)
    datasets.enable_progress_bars()
    datasets.concatenate_datasets(earlier.tables).select(order).save_to_disk(folder)
    return datasets.load_from_disk(folder)


def replace_dataset(output_dir: Path):
    """Two renames: at every moment a whole dataset is in dataset/ or in unfinished/replaced."""
    folder, work = output_dir / "dataset", output_dir / "unfinished"
    if folder.exists():
        shutil.rmtree(work / "replaced", ignore_errors=True)
        os.replace(folder, work / "replaced")
    os.replace(work / "dataset", folder)
    shutil.rmtree(work)
