"""How is a measured cost law saved, shared through the Hub, and turned into a plan for other data?"""

import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.utils import PushToHubMixin

from .buckets.cost import Measurement, MemoryModel, cost_model_from_dict
from .buckets.deal import check_ranks
from .buckets.fit import CostFit, fit_cost_model
from .buckets.flops import count_flops
from .buckets.memory import fit_memory_model
from .buckets.plan import BucketPlan, make_plan
from .buckets.shapes import LatentShape, TokenGeometry
from .buckets.simulate import BALANCES, ComparisonRow, compare
from .config_file import (
    CONFIG_FILE,
    FORMAT_VERSION,
    MEASUREMENTS_FILE,
    check_fields,
    check_tokens,
    cost_fields,
    is_counted,
    plain,
    read_config_measurements,
    read_fields,
    write_folder,
)
from .environment import (
    assumptions,
    current_environment,
    differences,
    freed_gradients_gib,
    memory_elsewhere,
    memory_limit,
    model_differences,
)
from .errors import UserError
from .hub import download, full_id, is_hub_id, push_folder

_Function = TypeVar("_Function", bound=Callable)
_typed_register: Callable[[_Function], _Function] = register_to_config  # diffusers' own would hide the class's types


class BucketConfig(ConfigMixin, PushToHubMixin):
    """
    A cost law and a memory law with the measurements and the set-up they come from; or, `from_flops`, a counted cost.

    Args: the fields of `bucket_config.json`, as JSON has them, and
        measurements: the `Measurement`s that were fitted; saved beside it as `measurements.jsonl`.

    Raises:
        UserError: a field is missing, unknown or out of range; the message names it.
    """

    config_name = CONFIG_FILE
    ignore_for_config = ["measurements"]  # noqa: RUF012 (diffusers' own form)

    @_typed_register
    def __init__(
        self,
        *,
        format_version: int,
        origin: str,
        model: dict,
        environment: dict,
        cost_model: dict,
        power_law: dict | None,
        memory_model: dict | None,
        example_plan: dict | None,
        batch_sizes: dict | None,
        measurements: Sequence[Measurement] = (),
    ):
        check_fields(self.config)
        self.origin = origin
        self.model = model
        self.environment = environment
        self.cost_model = cost_model_from_dict(cost_model)
        self.power_law = None if power_law is None else cost_model_from_dict(power_law)
        self.memory_model = None if memory_model is None else MemoryModel(**memory_model)
        self.geometry = TokenGeometry(tuple(model["patch_size"]), model["text_tokens"])
        self.example_plan = None if example_plan is None else BucketPlan.from_dict(example_plan)
        self.batch_sizes = {LatentShape.parse(shape): size for shape, size in (batch_sizes or {}).items()}
        self.measurements = list(measurements)
        check_tokens(self.measurements, self.geometry)

    @classmethod
    def from_measurements(
        cls,
        measurements: Sequence[Measurement],
        *,
        geometry: TokenGeometry,
        model: dict[str, Any] | None = None,
        environment: dict[str, Any] | None = None,
        example_plan: BucketPlan | None = None,
        fit: CostFit | None = None,
        origin: str = "benchmark",
    ) -> "BucketConfig":
        """Fit the cost law (and the memory law where memory was measured).

        Args:
            measurements: `Measurement`s of one set-up.
            geometry: `TokenGeometry` of the model.
            model: JSON values that describe it: `class`, `config_hash`, `vae_scale` (frames and pixels that one latent
                stands for), and `base_model` where it is a Hub id.
            environment: JSON values of the set-up: `gpu`, `gpu_memory_gib`, `world_size`, `strategy`, `dp_shard_size`
                (of "hsdp"), `dtype`, `lora`, `patched`, `activation_checkpointing`, `gradient_accumulation_steps`,
                `gradient_gib`, `versions`. None: what this machine, where they were made, knows of it.
            example_plan: `BucketPlan` of the author's own data.
            fit: the `CostFit` to save, where it was made already.
            origin: "benchmark", or "training_log" if the measurements are shares of a run's steps.

        Raises:
            UserError: tokens of a measurement are not what `geometry` gives; or nothing can be fitted.
        """
        model = {**(model or {}), "patch_size": geometry.patch_size, "text_tokens": geometry.text_tokens}
        environment = current_environment() if environment is None else environment
        if not is_hub_id(model.get("base_model")):
            model.pop("base_model", None)
        fields = {"model": plain(model, "model"), "environment": plain(environment, "environment")}
        fit = fit or fit_cost_model(measurements)
        memory = None
        if any(m.peak_gib > 0 for m in measurements):
            freed_gib = freed_gradients_gib(environment)
            memory = fit_memory_model(measurements, environment.get("gpu_memory_gib"), freed_gib)
        return cls(
            format_version=FORMAT_VERSION,
            origin=origin,
            **fields,
            cost_model=cost_fields(fit.candidates[fit.model.kind]),
            power_law=cost_fields(fit.candidates["power_law"]),
            memory_model=memory and asdict(memory),
            example_plan=example_plan and plain(example_plan.to_dict(), "example_plan"),
            batch_sizes=None,
            measurements=measurements,
        )

    @classmethod
    def from_flops(
        cls, transformer_config: Any, *, batch_sizes: Mapping | None = None, text_tokens: int | None = None
    ) -> "BucketConfig":
        """Without measuring: a cost proportional to the FLOPs of a transformer, which is enough to balance ranks.

        Args:
            transformer_config: a diffusers transformer, its `config`, or a folder with its config.json.
            batch_sizes: the batch sizes that your training uses, B by shape. They become the plan, and the largest B*S
                among them is the memory that is known to fit.
            text_tokens: as in `buckets.flops.count_flops`.

        Raises:
            UserError: a config whose FLOPs cannot be counted, or batch sizes that are none.
        """
        model_class, geometry, cost = count_flops(transformer_config, text_tokens)
        return cls(
            format_version=FORMAT_VERSION,
            origin="counted",
            model={"class": model_class, "patch_size": list(geometry.patch_size), "text_tokens": geometry.text_tokens},
            environment={},
            cost_model={"kind": cost.kind, "parameters": cost.parameters},
            power_law=None,
            memory_model=None,
            example_plan=None,
            batch_sizes=batch_sizes and plain(batch_sizes, "batch_sizes"),
        )

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        strict: bool = False,
        environment: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
    ) -> "BucketConfig":
        """Load from a folder or from the Hub. Only JSON is read; nothing in the files is executed.

        Args:
            pretrained_model_name_or_path: a folder that `save_pretrained` wrote, or a Hub id such as "user/repo".
            strict: refuse a config that `check_environment` finds any difference for.
            environment, model: as in `check_environment`, for `strict`; by default GPU and versions of this machine.
            revision, token, cache_dir, force_download, local_files_only: as in `huggingface_hub.snapshot_download`.

        Raises:
            UserError: nothing there, no access, or a file that is not as it must be (file and field are named).
        """
        folder = Path(pretrained_model_name_or_path)
        if folder.is_file():
            raise UserError(f"{folder} is a file, but a bucket config is a folder. Give {folder.parent}.")
        if not folder.is_dir():
            files = [CONFIG_FILE, MEASUREMENTS_FILE]
            options = {"cache_dir": cache_dir, "force_download": force_download, "local_files_only": local_files_only}
            folder = download(str(pretrained_model_name_or_path), files, revision=revision, token=token, **options)
        fields = read_fields(folder / CONFIG_FILE)
        path = folder / MEASUREMENTS_FILE
        measurements, problems = ([], []) if is_counted(fields) else read_config_measurements(path)
        for problem in problems:
            warnings.warn(f"{problem} The other lines are used.", stacklevel=2)
        try:
            config = cls(**fields, measurements=measurements)
        except UserError as error:
            raise UserError(f"{folder / CONFIG_FILE}: {error}") from None
        different = config.check_environment(environment or current_environment(), model)
        if strict and different:
            raise UserError(
                f"{pretrained_model_name_or_path} was measured in another environment:\n  "
                + "\n  ".join(different)
                + "\nMeasure again here with recipes/benchmark_shapes.py, or load it with strict=False."
            )
        return config

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False, **push_options: Any) -> None:
        """Write `bucket_config.json`, `measurements.jsonl`, the card `README.md` and, with matplotlib, its picture.

        Args:
            save_directory: folder, created if missing.
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

    def push_to_hub(self, repo_id: str, *, saved_in: str | Path | None = None, **options: Any) -> str:
        """Upload the files that `save_pretrained` writes to a model repository, created if missing.

        Args:
            repo_id: "user/repo", or "repo" for your own namespace.
            saved_in: folder with this config, if there is one, so that a failed push keeps no other.
            options: `token`, `private`, `revision` and `commit_message` of `hub.push_folder`.

        Returns: URL of the commit.

        Raises:
            UserError: as in `hub.push_folder`; the message names the folder that has the files.
        """
        folder = Path(tempfile.mkdtemp(prefix="bucket_config_"))
        keep = saved_in is None
        try:
            url = self._push(folder, repo_id, saved_in=saved_in, **options)
            keep = False
        finally:
            if not keep:
                shutil.rmtree(folder)
        return url

    def plan(
        self,
        shape_counts: Mapping[LatentShape, int],
        *,
        world_size: int,
        gradient_accumulation_steps: int = 1,
        balance: str = "auto",
        memory_limit_gib: float | None = None,
        target_seconds: float | str = "auto",
        policy: str | None = None,
        allow_extrapolation: bool = False,
        batch_sizes: Mapping | None = None,
        samples_per_step: float | None = None,
    ) -> BucketPlan:
        """`buckets.plan.make_plan` with this config's laws.

        Args:
            shape_counts: samples by `LatentShape`.
            memory_limit_gib: None takes 90% of the memory of the GPU here, or without one of the measured GPU; the
                plan's findings state it. Without measured memory the largest micro-batch measured is the limit.
            policy: None is "dual", or "fixed" where the config has batch sizes of its own.
            the rest: as in `make_plan`.
        """
        check_ranks(world_size, gradient_accumulation_steps)
        policy = policy or ("fixed" if self.batch_sizes else "dual")
        if policy == "fixed":
            own = {str(shape): size for shape, size in self.batch_sizes.items() if shape in shape_counts}
            batch_sizes = own | {str(shape): size for shape, size in (batch_sizes or {}).items()}
        options, findings = self._plan_options(world_size, gradient_accumulation_steps, memory_limit_gib)
        plan = make_plan(
            shape_counts,
            self.cost_model,
            world_size=world_size,
            gradient_accumulation_steps=gradient_accumulation_steps,
            balance=balance,
            target_seconds=target_seconds,
            policy=policy,
            batch_sizes=batch_sizes,
            allow_extrapolation=allow_extrapolation,
            samples_per_step=samples_per_step,
            **options,
        )
        return replace(plan, findings=(*findings, *plan.findings))

    def compare(
        self,
        shape_counts: Mapping[LatentShape, int],
        *,
        policies: Sequence[str] | None = None,
        balances: Sequence[str] = BALANCES,
        world_sizes: Sequence[int],
        accumulations: Sequence[int] = (1,),
        samples_per_step: float | None = None,
        target_seconds: float | str = "auto",
        **options: Any,
    ) -> list[ComparisonRow]:
        """`buckets.simulate.compare` of plans by this config. The baseline is what trains without this package: batch
        sizes of equal tokens, or the config's own, in random order.

        Args:
            policies: None is the baseline's and "dual".
            samples_per_step: for "dual" alone. target_seconds: for "dual" and "equal_time".
            options: further arguments of `plan`.
            the rest: as in `buckets.simulate.compare`.
        """
        baseline = "fixed" if self.batch_sizes else "equal_token"

        def plan(policy, **run):
            steer = {"samples_per_step": samples_per_step} if policy == "dual" else {}
            steer |= {"target_seconds": target_seconds} if policy in ("dual", "equal_time") else {}
            return self.plan(shape_counts, policy=policy, **steer, **run, **options)

        return compare(
            plan,
            self.cost_model,
            policies=policies or (baseline, "dual"),
            balances=balances,
            world_sizes=world_sizes,
            accumulations=accumulations,
            baseline=baseline,
        )

    def assumptions(self, world_size: int, accumulation: int = 1, memory_limit_gib: float | None = None) -> list[str]:
        """What a plan for these ranks and K takes for granted: memory limit, other ranks, K or GPU than measured."""
        return self._plan_options(world_size, accumulation, memory_limit_gib)[1]

    def check_environment(self, environment: dict[str, Any], model: dict[str, Any] | None = None) -> list[str]:
        """List where this config was measured otherwise than it is to be used.

        Args:
            environment: as in `from_measurements`; only keys that both sides have are compared.
            model: likewise, or None.

        Returns: one sentence a difference.
        """
        return differences(self.environment, environment) + model_differences(self.model, plain(model or {}, "model"))

    def _plan_options(self, world_size, accumulation, memory_limit_gib):
        """What this config adds to the arguments of `make_plan`, and what the user should know of it."""
        findings, memory = assumptions(self.environment, world_size), self.memory_model
        if memory is not None:
            memory, said = memory_elsewhere(memory, self.environment, world_size, accumulation)
            findings += said
            if memory.known_tokens is not None:
                findings.append(
                    f"How memory grows beyond B*S = {memory.known_tokens} was not measured; it is taken as "
                    "proportional to B*S, the most it can be. Measure a micro-batch twice as large."
                )
            if memory_limit_gib is None:
                memory_limit_gib, said = memory_limit(self.environment)
                findings = [*([said] if said else []), *findings]
        if self.origin == "counted":
            findings.append("The cost was counted from the model's config: right in proportion, but no seconds.")
        fit = [(m.batch_size, m.tokens) for m in self.measurements if not m.oom]
        tokens = [sample_tokens for _, sample_tokens in fit]
        fit = fit or [(size, self.geometry.tokens(shape)) for shape, size in self.batch_sizes.items()]
        options = {
            "memory": memory,
            "geometry": self.geometry,
            "memory_limit_gib": memory_limit_gib,
            "m_mem_tokens": None if memory_limit_gib else max((size * s for size, s in fit), default=None),
            "measured_tokens": (min(tokens), max(tokens)) if tokens else None,
        }
        return options, findings

    def _write(self, folder, repo_id=None):
        """Names of the files written; the card's example loads `repo_id`."""
        if folder.exists() and not folder.is_dir():
            raise UserError(f"save_pretrained needs a folder, but {folder} is a file. Choose another name.")
        plan = self.example_plan
        self.register_to_config(example_plan=plan and plain(plan.to_dict(), "example_plan"))
        return write_folder(self, folder, repo_id)

    def _push(self, folder, repo_id, *, token=None, commit_message="Upload bucket config", **options):
        repo_id = full_id(repo_id, token=token)
        files = self._write(folder, repo_id)
        return push_folder(folder, files, repo_id, token=token, commit_message=commit_message, **options)
