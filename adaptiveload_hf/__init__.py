"""Which names does the package offer? Imported on first use, so `import adaptiveload_hf` stays light."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers and editors, which do not run __getattr__
    from .adaln.adapters import register_adapter as register_adapter
    from .adaln.adapters import source_digest as source_digest
    from .adaln.attention import AdaptiveLoadAttnProcessor as AdaptiveLoadAttnProcessor
    from .adaln.patch import PatchReport as PatchReport
    from .adaln.patch import patch_model as patch_model
    from .adaln.patch import patched as patched
    from .adaln.patch import unpatch_model as unpatch_model
    from .benchmark import measure_shapes as measure_shapes
    from .benchmark import measure_steps as measure_steps
    from .buckets.cost import Measurement as Measurement
    from .buckets.fit import fit_cost_model as fit_cost_model
    from .buckets.loader import BucketDataLoader as BucketDataLoader
    from .buckets.memory import fit_memory_model as fit_memory_model
    from .buckets.plan import BucketPlan as BucketPlan
    from .buckets.plan import dual_constraint_batch_size as dual_constraint_batch_size
    from .buckets.plan import make_plan as make_plan
    from .buckets.sampler import BucketBatchSampler as BucketBatchSampler
    from .buckets.schedule import EpochSchedule as EpochSchedule
    from .buckets.schedule import schedule_epoch as schedule_epoch
    from .buckets.shapes import LatentShape as LatentShape
    from .buckets.shapes import TokenGeometry as TokenGeometry
    from .buckets.shapes import index_shapes as index_shapes
    from .buckets.shapes import read_shapes as read_shapes
    from .buckets.sources import load_latent_folder as load_latent_folder
    from .buckets.sources import load_prepared as load_prepared
    from .buckets.sources import load_tar_shards as load_tar_shards
    from .config import BucketConfig as BucketConfig
    from .distributed import all_ranks_fail_together as all_ranks_fail_together
    from .distributed import make_accelerator as make_accelerator
    from .distributed import model_input_dtype as model_input_dtype
    from .errors import UserError as UserError
    from .monitor import TrainingMonitor as TrainingMonitor

__version__ = "0.1.0"

_PUBLIC = {
    "UserError": "errors",
    "patch_model": "adaln.patch",
    "unpatch_model": "adaln.patch",
    "patched": "adaln.patch",
    "PatchReport": "adaln.patch",
    "register_adapter": "adaln.adapters",
    "source_digest": "adaln.adapters",
    "AdaptiveLoadAttnProcessor": "adaln.attention",
    "load_prepared": "buckets.sources",
    "load_latent_folder": "buckets.sources",
    "load_tar_shards": "buckets.sources",
    "read_shapes": "buckets.shapes",
    "index_shapes": "buckets.shapes",
    "LatentShape": "buckets.shapes",
    "TokenGeometry": "buckets.shapes",
    "Measurement": "buckets.cost",
    "fit_cost_model": "buckets.fit",
    "fit_memory_model": "buckets.memory",
    "dual_constraint_batch_size": "buckets.plan",
    "make_plan": "buckets.plan",
    "BucketPlan": "buckets.plan",
    "schedule_epoch": "buckets.schedule",
    "EpochSchedule": "buckets.schedule",
    "BucketBatchSampler": "buckets.sampler",
    "BucketDataLoader": "buckets.loader",
    "BucketConfig": "config",
    "make_accelerator": "distributed",
    "model_input_dtype": "distributed",
    "all_ranks_fail_together": "distributed",
    "measure_shapes": "benchmark",
    "measure_steps": "benchmark",
    "TrainingMonitor": "monitor",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
