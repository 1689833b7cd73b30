"""Which names does the package offer? Imported on first use, so `import adaptiveload_hf` stays light."""

import importlib

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
    "LatentShape": "buckets.shapes",
    "TokenGeometry": "buckets.shapes",
    "Measurement": "buckets.cost",
    "fit_cost_model": "buckets.fit",
    "fit_memory_model": "buckets.fit",
    "dual_constraint_batch_size": "buckets.plan",
    "make_plan": "buckets.plan",
    "BucketPlan": "buckets.plan",
    "schedule_epoch": "buckets.schedule",
    "EpochSchedule": "buckets.schedule",
    "BucketBatchSampler": "buckets.sampler",
    "BucketDataLoader": "buckets.sampler",
    "BucketConfig": "config",
    "make_accelerator": "distributed",
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
