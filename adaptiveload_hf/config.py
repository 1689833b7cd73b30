"""How is a measured cost law saved, shared through the Hub, and turned into a plan for other data?"""

import tempfile
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import accelerate
import diffusers
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.utils import PushToHubMixin

from . import __version__
from .buckets.cost import MemoryModel, cost_model_from_dict, fit_cost_model, fit_memory_model
from .buckets.plan import BucketPlan, make_plan
from .buckets.shapes import LatentShape, TokenGeometry
from .buckets.simulate import compare
from .card import write_card
from .config_file import (
    CONFIG_FILE,
    FORMAT_VERSION,
    MEASUREMENTS_FILE,
    check_fields,
    plain,
    read_config_measurements,
    read_fields,
)
from .errors import UserError
from .hub import download, is_hub_id, make_repository, upload

MEMORY_RESERVE = 0.1  # of the GPU's memory: CUDA context, NCCL buffers and fragmentation, which no measurement sees
_MODEL_KEYS = ("class", "config_hash", "patch_size", "text_tokens")
# The plan is made anew for the user's own ranks and accumulation, so those two may differ.
_MAY_DIFFER = ("world_size", "gradient_accumulation_steps")


class BucketConfig(ConfigMixin, PushToHubMixin):
    """
    A cost law and a memory law with the measurements and the set-up they come from.

    Args: the fields of `bucket_config.json`, as JSON has them, and
        measurements: the `Measurement`s that were fitted; saved beside it as `measurements.jsonl`.

    Raises:
        UserError: a field is missing, unknown or out of range; the message names it.
    """

    config_name = CONFIG_FILE
    ignore_for_config = ["measurements"]  # noqa: RUF012 (diffusers' own form)

    @register_to_config
    def __init__(
        self,
        *,
        format_version: int,
        model: dict,
        environment: dict,
        cost_model: dict,
        power_law: dict,
        memory_model: dict | None,
        example_plan: dict | None,
        measurements=(),
    ):
        check_fields(self.config)
        self.model = model
        self.environment = environment
        self.cost_model = cost_model_from_dict(cost_model)
        self.power_law = cost_model_from_dict(power_law)
        self.memory_model = None if memory_model is None else MemoryModel(**memory_model)
        self.geometry = TokenGeometry(tuple(model["patch_size"]), model["text_tokens"])
        self.example_plan = None if example_plan is None else _read_plan(example_plan)
        self.measurements = list(measurements)
        _check_tokens(self.measurements, self.geometry)

    @classmethod
    def from_measurements(cls, measurements, *, model, environment, geometry, example_plan=None):
        """
        Fit the cost law (and the memory law where memory was measured).

        Args:
            measurements: `Measurement`s of one set-up.
            model: JSON values that describe the model: `class`, `config_hash`, and `base_model` where it is a Hub id.
            environment: JSON values that describe the set-up: `gpu`, `gpu_memory_gib`, `world_size`, `strategy`,
                `dtype`, `activation_checkpointing`, `patched`, `lora`, `gradient_accumulation_steps`, `versions`.
            geometry: `TokenGeometry` of the model.
            example_plan: `BucketPlan` of the author's own data.

        Raises:
            UserError: tokens of a measurement are not what `geometry` gives; or nothing can be fitted.
        """
        model = {**model, "patch_size": geometry.patch_size, "text_tokens": geometry.text_tokens}
        if not is_hub_id(model.get("base_model")):
            model.pop("base_model", None)
        fields = {"model": plain(model, "model"), "environment": plain(environment, "environment")}
        fit = fit_cost_model(measurements)
        memory = fit_memory_model(measurements) if any(m.peak_gib > 0 for m in measurements) else None
        return cls(
            format_version=FORMAT_VERSION,
            **fields,
            cost_model=_cost_fields(fit.candidates[fit.model.kind]),
            power_law=_cost_fields(fit.candidates["power_law"]),
            memory_model=memory and asdict(memory),
            example_plan=example_plan and plain(example_plan.to_dict(), "example_plan"),
            measurements=measurements,
        )

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path,
        *,
        strict=False,
        revision=None,
        token=None,
        cache_dir=None,
        force_download=False,
        local_files_only=False,
    ):
        """
        Load from a folder or from the Hub. Only JSON is read; nothing in the files is executed.

        Args:
            pretrained_model_name_or_path: a folder that `save_pretrained` wrote, or a Hub id such as "user/repo".
            strict: refuse a config that was measured on another GPU or with other versions than are here.
            revision, token, cache_dir, force_download, local_files_only: as in `huggingface_hub.snapshot_download`.

        Raises:
            UserError: nothing there, no access, or a file that is not as it must be (file and field are named).
        """
        folder = Path(pretrained_model_name_or_path)
        if not folder.is_dir():
            folder = download(
                str(pretrained_model_name_or_path),
                [CONFIG_FILE, MEASUREMENTS_FILE],
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                force_download=force_download,
                local_files_only=local_files_only,
            )
        fields = read_fields(folder / CONFIG_FILE)
        measurements, problems = read_config_measurements(folder / MEASUREMENTS_FILE)
        for problem in problems:
            warnings.warn(f"{problem} The other lines are used.", stacklevel=2)
        try:
            config = cls(**fields, measurements=measurements)
        except UserError as error:
            raise UserError(f"{folder / CONFIG_FILE}: {error}") from None
        differences = config.check_environment(current_environment()) if strict else []
        if differences:
            raise UserError(
                f"{pretrained_model_name_or_path} was measured in another environment:\n  "
                + "\n  ".join(differences)
                + "\nMeasure again here with recipes/benchmark_shapes.py, or load it with strict=False."
            )
        return config

    def save_pretrained(self, save_directory, push_to_hub=False, **push_options):
        """
        Write `bucket_config.json`, `measurements.jsonl`, the card `README.md` and, with matplotlib, its picture.

        Args:
            save_directory: folder, made if missing.
            push_to_hub: then push what was written; `push_options` are those of the method `push_to_hub`, whose
                `repo_id` is by default the folder's name in your namespace.

        Raises:
            UserError: `save_directory` is a file; or the push failed (the files stay in the folder).
        """
        folder = Path(save_directory)
        if push_options and not push_to_hub:
            raise UserError(f"{sorted(push_options)} are options of a push, so pass push_to_hub=True with them.")
        self._write(folder)
        if push_to_hub:
            self._push(folder, push_options.pop("repo_id", folder.resolve().name), **push_options)

    def push_to_hub(self, repo_id, *, token=None, private=None, commit_message="Upload bucket config"):
        """
        Upload the files that `save_pretrained` writes to a model repository, which is made if missing.

        Args:
            repo_id: "user/repo", or "repo" for your own namespace.
            token: one that may write; None takes that of `hf auth login`.
            private: whether a new repository is private; None leaves it to the Hub's defaults.
            commit_message: title of the commit.

        Returns: URL of the commit, str.

        Raises:
            UserError: not logged in, no right to write, another visibility than asked for, or the Hub fails.
        """
        with tempfile.TemporaryDirectory() as folder:
            return self._push(Path(folder), repo_id, token=token, private=private, commit_message=commit_message)

    def plan(
        self,
        shape_counts,
        *,
        world_size,
        gradient_accumulation_steps=1,
        memory_limit_gib=None,
        target_seconds="auto",
        policy="dual",
        allow_extrapolation=False,
        batch_sizes=None,
    ):
        """
        `buckets.plan.make_plan` with this config's laws.

        Args:
            shape_counts: samples by `LatentShape`.
            memory_limit_gib: None takes (1 - MEMORY_RESERVE) of the GPU memory that the config was measured with, or
                of this machine's GPU where that is smaller; the plan's findings state it. Without measured memory
                the largest micro-batch that was measured is the limit.
            the rest: as in `make_plan`.

        Returns: `BucketPlan`.
        """
        options, findings = self._plan_options(world_size, memory_limit_gib)
        plan = make_plan(
            shape_counts,
            self.cost_model,
            self.memory_model,
            world_size=world_size,
            gradient_accumulation_steps=gradient_accumulation_steps,
            target_seconds=target_seconds,
            policy=policy,
            batch_sizes=batch_sizes,
            allow_extrapolation=allow_extrapolation,
            **options,
        )
        return replace(plan, findings=(*findings, *plan.findings))

    def compare(
        self,
        shape_counts,
        *,
        world_size,
        gradient_accumulation_steps=1,
        memory_limit_gib=None,
        target_seconds="auto",
        allow_extrapolation=False,
    ):
        """
        `buckets.simulate.compare` with this config's laws.

        Args: as in `plan`.

        Returns: list of `buckets.simulate.ComparisonRow`, the baseline first.
        """
        return compare(
            shape_counts,
            self.cost_model,
            self.memory_model,
            world_size=world_size,
            gradient_accumulation_steps=gradient_accumulation_steps,
            target_seconds=target_seconds,
            allow_extrapolation=allow_extrapolation,
            **self._plan_options(world_size, memory_limit_gib)[0],
        )

    def check_environment(self, environment, model=None):
        """
        List where this config was measured otherwise than it is to be used.

        Args:
            environment: as in `from_measurements`; only keys that both sides have are compared.
            model: likewise, or None.

        Returns: one sentence a difference, as list[str].
        """
        measured, here = _flat(self.environment), _flat(environment)
        differences = [
            f"{key}: measured with {measured[key]}, here {here[key]}"
            for key in sorted(measured.keys() & here.keys())
            if key not in _MAY_DIFFER and not _same(measured[key], here[key])
        ]
        model = plain(model or {}, "model")
        return differences + [
            f"model {key}: measured with {self.model[key]}, here {model[key]}"
            for key in _MODEL_KEYS
            if key in model and key in self.model and model[key] != self.model[key]
        ]

    def _plan_options(self, world_size, memory_limit_gib):
        """What this config adds to the arguments of `make_plan`, and what the user should know of it."""
        fitted = [measurement for measurement in self.measurements if not measurement.oom]
        tokens = [measurement.tokens for measurement in fitted]
        findings = []
        if memory_limit_gib is None and self.memory_model is not None:
            memories = (self.environment.get("gpu_memory_gib"), current_environment()["gpu_memory_gib"])
            if memory := min((gib for gib in memories if gib), default=None):
                memory_limit_gib = (1 - MEMORY_RESERVE) * memory
                share = f"{1 - MEMORY_RESERVE:.0%} of a GPU with {memory:.1f} GiB"
                findings.append(f"Memory limit {memory_limit_gib:.1f} GiB: {share}.")
        if self.environment.get("world_size") not in (None, world_size):
            findings.append(
                f"Measured on {self.environment['world_size']} ranks, planned for {world_size}: a micro-batch is "
                "assumed to take as long there as it did on the measured ranks."
            )
        options = {
            "geometry": self.geometry,
            "memory_limit_gib": memory_limit_gib,
            "m_mem_tokens": max(measurement.batch_size * measurement.tokens for measurement in fitted),
            "measured_tokens": (min(tokens), max(tokens)),
        }
        return options, findings

    def _write(self, folder, repo_id=None):
        """Names of the files written; the card's example loads `repo_id`."""
        if folder.exists() and not folder.is_dir():
            raise UserError(f"save_pretrained needs a folder, but {folder} is a file. Choose another name.")
        plan = self.example_plan
        self.register_to_config(example_plan=plan and plain(plan.to_dict(), "example_plan"))
        self.save_config(folder)
        lines = "".join(measurement.to_json() + "\n" for measurement in self.measurements)
        (folder / MEASUREMENTS_FILE).write_text(lines, encoding="utf-8")
        return [CONFIG_FILE, MEASUREMENTS_FILE, *write_card(self, folder, repo_id)]

    def _push(self, folder, repo_id, *, token=None, private=None, **options):
        repo_id = make_repository(repo_id, token=token, private=private)
        return upload(folder, self._write(folder, repo_id), repo_id, token=token, **options)


def current_environment():
    """The part of `environment` that this machine knows by itself: `gpu`, `gpu_memory_gib` and `versions`."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    packages = (torch, diffusers, accelerate)
    return {
        "gpu": gpu and gpu.name,
        "gpu_memory_gib": gpu and round(gpu.total_memory / 2**30, 2),
        "versions": {"adaptiveload_hf": __version__, **{p.__name__: str(p.__version__) for p in packages}},
    }


def _read_plan(saved):
    try:
        return BucketPlan.from_dict(saved)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"example_plan is no plan of this version ({error!r}). Set it to null.") from None


def _check_tokens(measurements, geometry):
    for measurement in measurements:
        tokens = geometry.tokens(LatentShape.parse(measurement.shape))
        if tokens != measurement.tokens:
            raise UserError(
                f"{measurement.shape} was measured with {measurement.tokens} tokens, but patch size "
                f"{geometry.patch_size} and {geometry.text_tokens} text tokens make {tokens}. "
                "Give the geometry of the measured model."
            )


def _cost_fields(candidate):
    errors = {
        "median": candidate.median_error,
        "max": candidate.max_error,
        "leave_one_out": candidate.leave_one_out_error,
    }
    return {"kind": candidate.model.kind, "parameters": candidate.model.parameters, "errors": errors}


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
