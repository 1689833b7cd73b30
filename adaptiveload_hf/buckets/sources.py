"""How do prepared or cached latents, in files or tar shards, become a dataset with shapes and random access?"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from .latent_files import StoredTensor, is_passed_over, load_pt_latent, name_tensors, name_text_tensors, read_header
from .sample_rows import COLUMNS, ReadSamples, keep_one_kind, make_place, make_table
from .tar_index import open_index

if TYPE_CHECKING:
    from datasets import Dataset

# musubi-tuner's latent files: KEY_[FRAME-COUNT_]WIDTHxHEIGHT_ARCHITECTURE.safetensors, where clips have a frame part.
_MUSUBI_IMAGE = re.compile(r"(?P<key>.+)_\d+x\d+_(?P<architecture>[^_]+)\.safetensors")
_MUSUBI_CLIP = re.compile(r"(?P<key>.+)_\d+-\d+(-\d+)?_\d+x\d+_(?P<architecture>[^_]+)\.safetensors")
_TEXT = "_te.safetensors"


def load_prepared(path: str | Path) -> Dataset:
    """Loads what recipes/prepare_dataset.py wrote: its output folder, or the folder `dataset` inside it.

    Its rows can be selected by columns without reading tensors: latent_shape, prompt_embeds_shape, caption, file, ...

    Returns:
        A `datasets.Dataset`. A whole row also has the tensors, as `collate_prepared` takes them.

    Raises:
        UserError: there is no such dataset, or it is damaged, empty or not whole.
    """
    import datasets

    folder = Path(path)
    if (folder / "dataset" / "state.json").is_file():
        folder = folder / "dataset"
    if not (folder / "state.json").is_file():
        raise UserError(
            f"Expected a prepared dataset in {path}, but found none there. "
            "Give the --output_dir of recipes/prepare_dataset.py, which makes one of your clips and pictures."
        )
    try:
        # `datasets` saves an empty table, but cannot load it.
        filled = bool(json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"])
        dataset = datasets.load_from_disk(str(folder)) if filled else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"The dataset in {folder} is not whole: {error}. Run recipes/prepare_dataset.py again, with --overwrite."
        ) from None
    if dataset is None:
        raise UserError(f"The dataset in {folder} is empty. See prepare_report.json beside it for what was refused.")
    if not set(COLUMNS) <= set(dataset.column_names):
        return dataset
    root = Path(os.path.abspath(folder)).parent
    _check_shards(dataset, root)
    return dataset.with_transform(ReadSamples(str(root), True, dataset[0]["prompt_embeds_shape"][0]))


def _check_shards(dataset, root: Path) -> None:
    """Raises a UserError unless every file that the rows name is there, as long as they need it."""
    import pyarrow.compute

    for path, *place in (("path", "offset", "size"), ("text_path", "text_offset", "text_size")):
        ends = pyarrow.compute.add(*(dataset.data.column(name) for name in place))
        needed = (
            pyarrow.table([dataset.data.column(path), ends], [path, "end"]).group_by(path).aggregate([("end", "max")])
        )
        for row in sorted(needed.to_pylist(), key=str):
            shard = root / row[path]
            if not shard.is_file() or shard.stat().st_size < row["end_max"]:
                raise UserError(
                    f"{shard} is missing or cut short. Copy all of {root}, or run recipes/prepare_dataset.py again."
                )


def load_latent_folder(
    folder: str | Path, *, latent_normalized: bool | None = None, prompt_length: int | None = None
) -> tuple[Dataset, list[str]]:
    """Loads a folder of cached latents, one sample a file: musubi-tuner's and SimpleTuner's caches, or plain files.

    Only headers are read; a row reads its tensors when it is asked for. Files are taken in the order of their paths.

    Args:
        folder: *.safetensors or *.pt files, in it or below.
        latent_normalized: whether the latents are (raw - mean) / std already. The files do not say.
        prompt_length: rows that each prompt_embeds is given, zeros after the caption's own, as the model was
            trained: 512 for Wan. Needed where the captions are stored at their own lengths.

    Returns:
        A `datasets.Dataset` whose rows are like those of recipes/prepare_dataset.py, and a list of str, one for each
        file that is not used, with the reason.

    Raises:
        UserError: nothing usable there, or an argument that must be given.
    """
    _check_options(latent_normalized, prompt_length)
    root = Path(folder)
    problems: list[str] = []

    def note(error: OSError) -> None:
        problems.append(f"{error.filename}: {error.strerror}")

    names = sorted(
        Path(parent, name).relative_to(root).as_posix() if parent != str(root) else name
        for parent, _, files in os.walk(root, onerror=note)
        for name in files
        if name.endswith((".safetensors", ".pt")) and not name.startswith(".")
    )
    places, varlen = _find_samples(root, names, problems)
    table = keep_one_kind(make_table(places), problems)
    if not len(table):
        found = f"; {problems[0]}" if problems else ""
        raise UserError(f"Expected latents in *.safetensors or *.pt files in {folder}, but found none{found}.")
    import datasets

    dataset = datasets.Dataset(table)
    return _with_tensors(dataset, root, latent_normalized, prompt_length, varlen), problems


def load_tar_shards(
    shards: str | Path | Sequence[str | Path],
    *,
    latent_normalized: bool | None = None,
    prompt_length: int | None = None,
    index: str | Path | None = None,
) -> tuple[Dataset, list[str]]:
    """Loads WebDataset shards whose samples are `KEY.latent.safetensors` and `KEY.json`, by random access.

    A file of offsets is written beside the shards at the first time, and again when a shard's size or time of change
    is another. Let one process do that first: `with accelerator.main_process_first(): ...`.

    Args:
        shards: a folder with *.tar in it or below, or the files. They are taken in the order of their paths.
        latent_normalized, prompt_length: as in `load_latent_folder`.
        index: where to keep the offsets, if the shards' folder cannot be written.

    Returns:
        A `datasets.Dataset` whose rows are like those of recipes/prepare_dataset.py with what the json holds, and a
        list of str, one for each sample or rest of a shard that is not used, with the reason.

    Raises:
        UserError: nothing usable there, or an argument that must be given.
    """
    _check_options(latent_normalized, prompt_length)
    passed_over: list[str] = []
    if isinstance(shards, str | Path) and Path(shards).is_dir():
        found = {file: file.relative_to(shards) for file in sorted(Path(shards).rglob("*.tar"))}
        files = [file for file, name in found.items() if not any(map(is_passed_over, name.parts))]
        passed_over = [
            f"{name}: it is in a folder that is hidden or a system's own; not used"
            for name in found.values()
            if any(map(is_passed_over, name.parent.parts))
        ]
    else:
        files = sorted(Path(shard) for shard in ([shards] if isinstance(shards, str | Path) else shards))
    if not files or not all(file.is_file() for file in files):
        missing = next((file for file in files if not file.is_file()), shards)
        raise UserError(f"Expected *.tar shards, or a folder with some, but found none at {missing}.")
    root = Path(os.path.commonpath([os.path.abspath(file.parent) for file in files]))
    dataset, problems = open_index(root, [Path(os.path.abspath(file)) for file in files], index)
    problems = problems + passed_over
    if not len(dataset):
        words = f"; {problems[0]}" if problems else ""
        raise UserError(f"Expected samples KEY.latent.safetensors with KEY.json in {files[0]}, but found none{words}.")
    return _with_tensors(dataset, root, latent_normalized, prompt_length, varlen=False), problems


def _check_options(latent_normalized, prompt_length) -> None:
    if not isinstance(latent_normalized, bool):
        raise UserError(
            f"latent_normalized must be True or False, but is {latent_normalized!r}. Caches do not say whether their "
            "latents are (raw - mean) / std already: those of musubi-tuner and SimpleTuner for Wan are, plain outputs "
            "of a VAE are not, and a model trained on the wrong ones learns noise. Say which these are."
        )
    if prompt_length is not None and (type(prompt_length) is not int or prompt_length < 1):
        raise UserError(f"prompt_length is a number of rows such as 512, or None, but found {prompt_length!r}.")


def _with_tensors(dataset, root: Path, latent_normalized: bool, prompt_length: int | None, varlen: bool):
    import pyarrow.compute

    lengths = pyarrow.compute.min_max(dataset.data.column("prompt_rows")).as_py()
    if prompt_length is None and (varlen or lengths["min"] != lengths["max"]):
        raise UserError(
            f"The caption embeddings have their own lengths, {lengths['min']} to {lengths['max']} rows, and must get "
            "one. Give prompt_length=..., which adds rows of zeros: 512 for Wan, as WanPipeline has it."
        )
    if prompt_length is not None and (lengths["max"] or 0) > prompt_length:
        raise UserError(f"A caption embedding has {lengths['max']} rows, more than prompt_length={prompt_length}.")
    return dataset.with_transform(ReadSamples(os.path.abspath(root), latent_normalized, prompt_length))


def _find_samples(root: Path, names: list[str], problems: list[str]) -> tuple[list[dict], bool]:
    """The samples among a folder's files, and whether their captions are stored at their own lengths."""
    texts: dict[str, tuple[dict[str, StoredTensor], str, int]] = {}
    latents = []
    for name in names:
        try:
            name.encode()  # Arrow holds UTF-8 only
            if any(map(is_passed_over, Path(name).parent.parts)):
                raise UserError("it is in a folder that is hidden or a system's own; not used")
            if (root / name).exists() and not (root / name).is_file():  # a named pipe would be waited for
                raise UserError("it is no file")
            if name.endswith(".pt"):
                found = (name, {"latent": load_pt_latent(root / name)[0]}, {}, (root / name).stat().st_size)
            else:
                tensors, metadata, size = _read_file(root / name)
                if name.endswith(_TEXT) and "caption1" in metadata:
                    texts[name] = (name_text_tensors(tensors), metadata["caption1"], size)
                    continue
                found = (name, name_tensors(tensors), metadata, size)
            latents.append(found)
        except UnicodeEncodeError:
            problems.append(f"{name!a}: the name is not UTF-8")
        except (UserError, OSError) as error:
            problems.append(f"{name}: {error.strerror if isinstance(error, OSError) else error}")
    places, used = [], set()
    for name, tensors, metadata, size in latents:
        text_path = _text_file(name, metadata)
        text, caption, text_size = texts.get(text_path, ({}, "", None))
        used.add(text_path)
        others = {key: tensor for key, tensor in tensors.items() if key != "latent"} | text
        values = {"caption": caption, "path": name, "size": size}
        if text:
            values |= {"text_path": text_path, "text_offset": 0, "text_size": text_size}
        places.append(make_place(name, tensors["latent"], others, **values))
    problems += [f"{name}: no latents belong to it" for name in texts if name not in used]
    used_texts = [texts[name][0] for name in used & texts.keys()]
    varlen = any(tensors["prompt_embeds"].varlen for tensors in used_texts if "prompt_embeds" in tensors)
    return places, varlen


def _read_file(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str], int]:
    with open(path, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        return *read_header(stream, 0, size), size


def _text_file(name: str, metadata: dict[str, str]) -> str:
    """The text encoder's file of a musubi-tuner latent; several cuts of one clip share it."""
    folder, _, file = name.rpartition("/")
    match = (_MUSUBI_CLIP if "frame_count" in metadata else _MUSUBI_IMAGE).fullmatch(file)
    if not match:
        return ""
    text = f"{match['key']}_{match['architecture']}{_TEXT}"
    return f"{folder}/{text}" if folder else text
