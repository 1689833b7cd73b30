"""What may stand in `bucket_config.json`, and how is it said where a file does not hold it?"""

import json
import math

import accelerate
import diffusers
import numpy as np
import torch

from . import __version__
from .buckets.cost import FlopCount, cost_model_from_dict, read_measurements
from .buckets.shapes import LatentShape
from .errors import UserError

FORMAT_VERSION = 1
CONFIG_FILE, MEASUREMENTS_FILE = "bucket_config.json", "measurements.jsonl"
FIELDS = ("format_version", "model", "environment", "cost_model", "power_law", "memory_model", "example_plan")
OPTIONAL_FIELDS = ("batch_sizes",)


def plain(value, field):
    """
    JSON's own types for what configs are built from: NumPy scalars and arrays, tuples, shapes as keys or values.

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


def read_fields(path):
    """
    Read `bucket_config.json` without the keys that diffusers adds.

    Args:
        path: `pathlib.Path` of the file.

    Returns: dict with the keys FIELDS, and maybe OPTIONAL_FIELDS.

    Raises:
        UserError: no such file, no JSON, another `format_version`, a key missing or unknown.
    """
    if not path.is_file():
        raise UserError(f"{path.parent} holds no {path.name}. Give a folder that BucketConfig.save_pretrained wrote.")

    def refuse(constant):
        raise UserError(f"{path}: {constant} stands where a finite number must be. Correct it.")

    try:
        fields = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
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
    fields = {key: value for key, value in fields.items() if not key.startswith("_")}
    if missing := [key for key in FIELDS if key not in fields]:
        raise UserError(f"{path} lacks {', '.join(missing)}. Restore it from where the config came.")
    known = (*FIELDS, *OPTIONAL_FIELDS)
    if unknown := sorted(fields.keys() - set(known)):
        raise UserError(f"{path} has unknown keys: {', '.join(unknown)}. The known ones are {', '.join(known)}.")
    return fields


def read_config_measurements(path):
    """
    Read `measurements.jsonl` of a config.

    Args:
        path: `pathlib.Path` of the file.

    Returns: (list of `Measurement`, list of str: one problem for each line that was left out).

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


def is_counted(fields):
    """Whether the cost was counted from a model's config, so that there are no measurements."""
    return isinstance(fields["cost_model"], dict) and fields["cost_model"].get("kind") == FlopCount.kind


def check_fields(fields):
    """
    Check each field that is computed with.

    Args:
        fields: dict with the keys FIELDS and OPTIONAL_FIELDS.

    Raises:
        UserError: the field's name, what it must be and what it is.
    """
    counted = is_counted(fields)
    for name in ("model", "environment", "cost_model", *(() if counted else ("power_law",))):
        _check_is(fields[name], dict, name)
    patch_size = fields["model"].get("patch_size")
    if not (isinstance(patch_size, list) and len(patch_size) == 3 and all(map(_is_count, patch_size))):
        raise UserError(f"model.patch_size must be three positive whole numbers, but it is {patch_size!r}.")
    text_tokens = fields["model"].get("text_tokens")
    if text_tokens != 0 and not _is_count(text_tokens):
        raise UserError(f"model.text_tokens must be a whole number of at least 0, but it is {text_tokens!r}.")
    _check_cost_model(fields["cost_model"], "cost_model", fitted=not counted)
    if counted and fields["power_law"] is not None:
        raise UserError(f"power_law must be null beside a counted cost, but it is {fields['power_law']!r}.")
    if not counted:
        _check_cost_model(fields["power_law"], "power_law", fitted=True)
        if fields["power_law"]["kind"] != "power_law":
            raise UserError(f"power_law.kind must be 'power_law', but it is {fields['power_law']['kind']!r}.")
    if fields["memory_model"] is not None:
        _check_memory_model(fields["memory_model"])
    if fields["example_plan"] is not None:
        _check_is(fields["example_plan"], dict, "example_plan")
    if fields["batch_sizes"] is not None:
        _check_is(fields["batch_sizes"], dict, "batch_sizes")
        for shape, size in fields["batch_sizes"].items():
            if not _is_count(size):
                raise UserError(f"batch_sizes.{shape} must be a positive whole number, but it is {size!r}.")
    memory = fields["environment"].get("gpu_memory_gib")
    if memory is not None and not (_is_number(memory) and memory > 0):
        raise UserError(f"environment.gpu_memory_gib must be a positive number or null, but it is {memory!r}.")
    for name in ("world_size", "gradient_accumulation_steps"):
        value = fields["environment"].get(name)
        if value is not None and not _is_count(value):
            raise UserError(f"environment.{name} must be a positive whole number or null, but it is {value!r}.")


def check_tokens(measurements, geometry):
    """
    Raises:
        UserError: a measurement whose tokens are not what the geometry makes of its shape.
    """
    for measurement in measurements:
        tokens = geometry.tokens(LatentShape.parse(measurement.shape))
        if tokens != measurement.tokens:
            raise UserError(
                f"{measurement.shape} was measured with {measurement.tokens} tokens, but patch size "
                f"{geometry.patch_size} and {geometry.text_tokens} text tokens make {tokens}. "
                "Give the geometry of the measured model."
            )


def current_environment():
    """The part of `environment` that this machine knows by itself: `gpu`, `gpu_memory_gib` and `versions`."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    packages = (torch, diffusers, accelerate)
    return {
        "gpu": gpu and gpu.name,
        "gpu_memory_gib": gpu and round(gpu.total_memory / 2**30, 2),
        "versions": {"adaptiveload_hf": __version__, **{p.__name__: str(p.__version__) for p in packages}},
    }


def differences(measured, here, may_differ):
    """
    List where two environments differ.

    Args:
        measured, here: `environment` of a config and of this run; only keys that both have are compared.
        may_differ: keys to leave out.

    Returns: one sentence a difference, as list[str].
    """
    measured, here = _flat(measured), _flat(here)
    return [
        f"{key}: measured with {measured[key]}, here {here[key]}"
        for key in sorted(measured.keys() & here.keys())
        if key not in may_differ and not _same(measured[key], here[key])
    ]


def _check_version(found, path):
    if found == FORMAT_VERSION and not isinstance(found, bool):
        return
    if found is None:
        raise UserError(f"{path} has no format_version, so it was not written by BucketConfig.save_pretrained.")
    if isinstance(found, int) and found > FORMAT_VERSION:
        raise UserError(
            f"{path} has format_version {found}, but this adaptiveload_hf reads {FORMAT_VERSION}. "
            "Upgrade: pip install --upgrade adaptiveload_hf"
        )
    raise UserError(f"{path}: format_version must be {FORMAT_VERSION}, but it is {found!r}.")


def _check_is(value, kind, field):
    if not isinstance(value, kind):
        raise UserError(f"{field} must be a JSON object, but it is {value!r}.")


def _check_cost_model(saved, field, fitted):
    _check_is(saved.get("parameters"), dict, f"{field}.parameters")
    if fitted:
        _check_is(saved.get("errors"), dict, f"{field}.errors")
        for name in ("median", "max", "leave_one_out"):
            _check_number(saved["errors"].get(name), f"{field}.errors.{name}")
    try:
        cost_model_from_dict({"kind": str(saved.get("kind")), "parameters": saved["parameters"]})
    except UserError as error:
        raise UserError(f"{field}: {error}") from None


def _check_memory_model(saved):
    _check_is(saved, dict, "memory_model")
    names = ("base_gib", "gib_per_token")
    if saved.keys() != set(names):
        raise UserError(
            f"memory_model must have the keys {', '.join(names)}, but it has {', '.join(saved) or 'none'}."
        )
    for name in names:
        _check_number(saved[name], f"memory_model.{name}")


def _check_number(value, field):
    if not (_is_number(value) and value >= 0):
        raise UserError(f"{field} must be a number of at least 0, but it is {value!r}.")


def _is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value):
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _key(key):
    if isinstance(key, tuple):
        return "x".join(map(str, key))
    return str(key)


def _flat(environment):
    """Nested keys as "versions.torch"."""
    flat = {}
    for key, value in environment.items():
        flat.update({f"{key}.{k}": v for k, v in _flat(value).items()} if isinstance(value, dict) else {key: value})
    return flat


def _same(measured, here):
    if isinstance(measured, float) and isinstance(here, int | float):
        return abs(measured - here) <= 0.01 * abs(measured)
    return measured == here
