"""What may stand in `bucket_config.json`, and how is it said where a file does not hold it?"""

import dataclasses
import json
import math
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .buckets.cost import FlopCount, Measurement, MemoryModel, cost_model_from_dict, read_measurements
from .buckets.deal import check_balance
from .buckets.fit import CandidateFit
from .buckets.plan import POLICIES, Bucket, BucketPlan
from .buckets.shapes import LatentShape, TokenGeometry
from .card import CARD_FILE, LIBRARY, write_card
from .errors import UserError

FORMAT_VERSION = 2
CONFIG_FILE, MEASUREMENTS_FILE = "bucket_config.json", "measurements.jsonl"
FIELDS = (
    *("format_version", "origin", "model", "environment", "cost_model", "power_law", "memory_model", "example_plan"),
    "batch_sizes",
)
ORIGINS = ("benchmark", "training_log", "counted")
_LARGEST = 1e12  # of any number: no product of a few of them leaves the range of float64


def cost_fields(candidate: CandidateFit) -> dict:
    """What the file says of a fitted law."""
    errors = {
        "median": candidate.median_error,
        "max": candidate.max_error,
        "leave_one_out": candidate.leave_one_out_error,
    }
    return {"kind": candidate.model.kind, "parameters": candidate.model.parameters, "errors": errors}


def plain(value: Any, field: str) -> Any:
    """JSON's own types for what configs are built from: NumPy scalars and arrays, tuples, shapes as keys or values.

    Args:
        value: any of these, nested.
        field: where it stands, for the message.

    Raises:
        UserError: a number that JSON cannot hold (inf, NaN), or another type.
    """
    if isinstance(value, dict):
        return {_key(key): plain(item, f"{field}.{_key(key)}") for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item, f"{field}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, LatentShape):
        return str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UserError(f"{field} must be a finite number for JSON, but it is {value}. Leave it out or pass None.")
        return value
    raise UserError(f"{field} must be a JSON value, but it is a {type(value).__name__}. Pass a str, number or list.")


def read_fields(path: Path) -> dict:
    """Read `bucket_config.json` without the keys that diffusers adds.

    Returns: the keys FIELDS; an older `format_version` is brought up to FORMAT_VERSION.

    Raises:
        UserError: no such file, no JSON, a newer `format_version`, a key missing, unknown or there twice.
    """
    if not path.is_file():
        raise UserError(
            f"{path.parent} holds no {path.name}. Give the folder that recipes/benchmark_shapes.py, `adaptiveload "
            "fit` or BucketConfig.save_pretrained wrote."
        )

    def refuse(constant):
        raise UserError(f"{path}: {constant} stands where a finite number must be. Correct it.")

    try:
        text = path.read_text(encoding="utf-8")
        fields = json.loads(text, parse_constant=refuse, object_pairs_hook=take_once(path))
    except RecursionError:
        raise UserError(f"{path} is nested too deep for a bucket config. Get it again from where it came.") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path} is not whole JSON: {error.msg} in line {error.lineno}. Correct it, or fit again: "
            f"adaptiveload fit {path.with_name(MEASUREMENTS_FILE)} --output {path.parent}"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}). Save it as UTF-8."
        ) from None
    if not isinstance(fields, dict):
        raise UserError(f"{path} must hold a JSON object, but it holds a {type(fields).__name__}.")
    _check_version(fields.get("format_version"), path)
    fields = _migrate({key: value for key, value in fields.items() if not key.startswith("_")})
    if missing := [key for key in FIELDS if key not in fields]:
        raise UserError(f"{path} lacks {', '.join(missing)}. Restore it from where the config came.")
    if unknown := sorted(fields.keys() - set(FIELDS)):
        raise UserError(f"{path} has unknown keys: {', '.join(unknown)}. The known ones are {', '.join(FIELDS)}.")
    return fields


def take_once(path: Path) -> Callable[[list[tuple[str, Any]]], dict]:
    """The `object_pairs_hook` of json that refuses a name which an object of this file has twice."""

    def take(pairs):
        taken = dict(pairs)
        if len(taken) < len(pairs):
            twice = sorted(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
            raise UserError(f"{path} has {', '.join(twice)} twice in one object. Keep the line that is right.")
        return taken

    return take


def read_config_measurements(path: Path) -> tuple[list[Measurement], list[str]]:
    """Read `measurements.jsonl` of a config.

    Returns: (the measurements, a sentence for each line that was left out).

    Raises:
        UserError: no such file, or no whole line in it.
    """
    if not path.is_file():
        raise UserError(f"{path.parent} holds no {path.name}, which tells the measured range. Restore it beside it.")
    measurements, problems = read_measurements(path)
    if all(measurement.oom for measurement in measurements):
        raise UserError(
            f"{path} holds no usable measurement ({len(problems)} unreadable lines). Measure again with "
            "recipes/benchmark_shapes.py."
        )
    return measurements, problems


def write_folder(config: Any, folder: Path, repo_id: str | None) -> list[str]:
    """Write a `BucketConfig`, its measurements and its card, each of them whole: a full disk or Ctrl-C loses nothing.

    A README.md that is no bucket config's stays, with a warning: the folder is a project's.

    Args:
        folder: made if missing.
        repo_id: Hub id for the card's example, or None.

    Returns: names of the files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder) as name:
        unfinished = Path(name)
        config.save_config(unfinished)
        files = [CONFIG_FILE]
        if config.measurements:
            lines = "".join(measurement.to_json() + "\n" for measurement in config.measurements)
            (unfinished / MEASUREMENTS_FILE).write_text(lines, encoding="utf-8")
            files.append(MEASUREMENTS_FILE)
        files += write_card(config, unfinished, repo_id)
        card = folder / CARD_FILE
        if card.is_file() and LIBRARY.encode() not in card.read_bytes():
            warnings.warn(f"{card} is not a bucket config's card, so it stays, and no card is saved.", stacklevel=4)
            files.remove(CARD_FILE)
        for name in files:
            os.replace(unfinished / name, folder / name)
    return files


def is_counted(fields: Mapping) -> bool:
    """Whether the cost was counted from a model's config, so that there are no measurements."""
    return isinstance(fields["cost_model"], dict) and fields["cost_model"].get("kind") == FlopCount.kind


def check_fields(fields: Mapping) -> None:
    """Check each field that is computed with.

    Args:
        fields: dict with the keys FIELDS.

    Raises:
        UserError: the field's name, what it must be and what it is.
    """
    counted = is_counted(fields)
    _check_one_of(fields["origin"], ("counted",) if counted else ORIGINS[:2], "origin")
    for name in ("model", "environment", "cost_model", *(() if counted else ("power_law",))):
        _check_object(fields[name], name)
    _check_model(fields["model"])
    _check_environment(fields["environment"])
    _check_cost_model(fields["cost_model"], "cost_model", fitted=not counted)
    if counted and fields["power_law"] is not None:
        raise UserError(f"power_law must be null beside a counted cost, but it is {_shown(fields['power_law'])}.")
    if not counted:
        _check_cost_model(fields["power_law"], "power_law", fitted=True)
        _check_one_of(fields["power_law"]["kind"], ("power_law",), "power_law.kind")
    if fields["memory_model"] is not None:
        _check_memory_model(fields["memory_model"])
    if fields["example_plan"] is not None:
        _check_plan(fields["example_plan"], "example_plan")
    if fields["batch_sizes"] is not None:
        _check_object(fields["batch_sizes"], "batch_sizes")
        for shape, size in fields["batch_sizes"].items():
            _check_shape(shape, "batch_sizes")
            _check_count(size, f"batch_sizes.{shape}")


def check_tokens(measurements: Iterable[Measurement], geometry: TokenGeometry) -> None:
    """
    Raises:
        UserError: a measurement whose tokens are not what the geometry makes of its shape.
    """
    for measurement in measurements:
        tokens = geometry.tokens(LatentShape.parse(measurement.shape))
        if tokens != measurement.tokens:
            raise UserError(
                f"{measurement.shape} was measured with {measurement.tokens} tokens, but {geometry} make {tokens}. "
                "Give the geometry of the measured model."
            )


def _migrate(fields):
    """Version 1 did not say where the cost comes from, and had batch_sizes only where there were some.

    Plans did not say which dealing they were for while all were for auto.
    """
    if fields["format_version"] == 1:
        counted = isinstance(fields.get("cost_model"), dict) and is_counted(fields)
        origin = "counted" if counted else "benchmark"
        fields = {"batch_sizes": None, **fields, "format_version": FORMAT_VERSION, "origin": origin}
    if isinstance(fields.get("example_plan"), dict):
        fields = {**fields, "example_plan": {"balance": "auto", **fields["example_plan"]}}
    return fields


def _check_version(found, path):
    if _is_count(found) and found <= FORMAT_VERSION:
        return
    if found is None:
        raise UserError(f"{path} has no format_version, so it was not written by BucketConfig.save_pretrained.")
    if isinstance(found, int) and found > FORMAT_VERSION:
        raise UserError(
            f"{path} has format_version {_shown(found)}, but this adaptiveload_hf reads up to {FORMAT_VERSION}. "
            "Install a newer one."
        )
    raise UserError(f"{path}: format_version must be a whole number up to {FORMAT_VERSION}, but it is {found!r}.")


def _check_model(model):
    patch_size = model.get("patch_size")
    if not (
        isinstance(patch_size, list) and len(patch_size) == 3 and all(_is_count(n, most=1024) for n in patch_size)
    ):
        raise UserError(
            f"model.patch_size must be three whole numbers from 1 to 1024, but it is {_shown(patch_size)}."
        )
    text_tokens = model.get("text_tokens")
    if text_tokens != 0 or isinstance(text_tokens, bool):
        _check_count(text_tokens, "model.text_tokens", least=0)
    scale = model.get("vae_scale")
    if scale is not None and not (isinstance(scale, list) and len(scale) == 2 and all(map(_is_count, scale))):
        raise UserError(f"model.vae_scale must be two whole numbers such as [4, 8], but it is {_shown(scale)}.")


def _check_environment(environment):
    for name in ("gpu", "strategy", "dtype"):
        if not isinstance(environment.get(name), str | None):
            raise UserError(f"environment.{name} must be a string or null, but it is {_shown(environment[name])}.")
    for name, least in (("gpu_memory_gib", 0.1), ("gradient_gib", 0.0)):
        if environment.get(name) is not None:
            _check_number(environment[name], f"environment.{name}", least=least)
    for name in ("world_size", "gradient_accumulation_steps", "dp_shard_size"):
        if environment.get(name) is not None:
            _check_count(environment[name], f"environment.{name}")


def _check_cost_model(saved, field, fitted):
    _check_object(saved.get("parameters"), f"{field}.parameters")
    for name, value in saved["parameters"].items():
        _check_number(value, f"{field}.parameters.{name}", most=10 if name == "p" else _LARGEST)
    if fitted:
        _check_object(saved.get("errors"), f"{field}.errors")
        for name in ("median", "max", "leave_one_out"):
            _check_number(saved["errors"].get(name), f"{field}.errors.{name}")
    try:
        cost_model_from_dict({"kind": str(saved.get("kind")), "parameters": saved["parameters"]})
    except UserError as error:
        raise UserError(f"{field}: {error}") from None


def _check_memory_model(saved):
    _check_object(saved, "memory_model")
    names = [field.name for field in dataclasses.fields(MemoryModel)]
    line, later = names[:2], names[2:]  # configs of before there was a floor have the line alone
    if not set(line) <= saved.keys() <= set(names):
        raise UserError(
            f"memory_model must have the keys {', '.join(line)} and may have {', '.join(later)}, but it has "
            f"{', '.join(saved) or 'none'}."
        )
    for name in saved.keys() - {"known_tokens"}:
        # Where memory grew by nothing that was measured, the fit has a very small slope.
        _check_number(saved[name], f"memory_model.{name}", least=1e-30 if name == "gib_per_token" else 0)
    if saved.get("known_tokens") is not None:
        _check_count(saved["known_tokens"], "memory_model.known_tokens")


def _check_plan(plan, field):
    """The author's plan is shown only, so what matters is that it can be."""
    _check_object(plan, field)
    _check_keys(plan, BucketPlan, field)
    _check_list(plan["buckets"], f"{field}.buckets")
    for number, bucket in enumerate(plan["buckets"]):
        inner = f"{field}.buckets[{number}]"
        _check_object(bucket, inner)
        _check_keys(bucket, Bucket, inner)
        _check_shape(bucket["shape"], f"{inner}.shape")
        for name in ("tokens", "count", "batch_size"):
            _check_count(bucket[name], f"{inner}.{name}")
        for name in ("seconds", "gib"):
            if name == "seconds" or bucket[name] is not None:
                _check_number(bucket[name], f"{inner}.{name}")
        _check_one_of(bucket["bound_by"], ("memory", "compute", "one", "given", "samples"), f"{inner}.bound_by")
    for name in ("target_seconds", "m_mem_tokens"):
        if plan[name] is not None:
            _check_number(plan[name], f"{field}.{name}")
    _check_one_of(plan["policy"], POLICIES, f"{field}.policy")
    _check_list(plan["findings"], f"{field}.findings")
    try:
        check_balance(plan["balance"])
    except UserError as error:
        raise UserError(f"{field}: {error}") from None


def _check_keys(found, kind, field):
    expected = [each.name for each in dataclasses.fields(kind)]
    if missing := [name for name in expected if name not in found]:
        raise UserError(f"{field} lacks {', '.join(missing)}. Set example_plan to null: it is made anew anyway.")


def _check_object(value, field):
    if not isinstance(value, dict):
        raise UserError(f"{field} must be a JSON object, but it is {_shown(value)}.")


def _check_list(value, field):
    if not isinstance(value, list):
        raise UserError(f"{field} must be a list, but it is {_shown(value)}.")


def _check_one_of(value, known, field):
    if value not in known:
        raise UserError(f"{field} must be {' or '.join(map(repr, known))}, but it is {_shown(value)}.")


def _check_shape(text, field):
    try:
        shape = LatentShape.parse(text) if isinstance(text, str) else None
    except UserError as error:
        raise UserError(f"{field}: {error}") from None
    if shape is None:
        raise UserError(f"{field} must be a shape such as '21x60x104', but it is {_shown(text)}.")


def _check_number(value, field, least=0, most=_LARGEST):
    if not (isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most):
        raise UserError(f"{field} must be a number from {least:g} to {most:g}, but it is {_shown(value)}.")


def _check_count(value, field, least=1):
    if not _is_count(value, least):
        raise UserError(f"{field} must be a whole number of at least {least}, below 2^31, but it is {_shown(value)}.")


def _is_count(value, least=1, most=(1 << 31) - 1):
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _shown(value):
    """As in Python, cut where it is long: an integer of JSON may have thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."


def _key(key):
    if isinstance(key, tuple):
        return "x".join(map(str, key))
    return str(key)
