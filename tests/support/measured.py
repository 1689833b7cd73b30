"""A bucket config fitted to steps that follow a known law, as tests of config, command line and report need one."""

import functools

from adaptiveload_hf.buckets.cost import Measurement, MemoryModel, Roofline
from adaptiveload_hf.buckets.shapes import LatentShape, TokenGeometry

COST = Roofline(floor=0.4, c0=0.01, c1=2e-5, c2=4e-10)
MEMORY = MemoryModel(base_gib=3.0, gib_per_token=1e-4)
BATCH_SIZES = {"1x60x104": (1, 16, 64), "5x60x104": (1, 4, 12), "13x60x104": (1, 3), "21x60x104": (1, 2)}
MODEL = {
    "class": "WanTransformer3DModel",
    "config_hash": "0123456789abcdef",
    "base_model": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
}
ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "gpu_memory_gib": 139.81,
    "world_size": 8,
    "strategy": "fsdp2",
    "dtype": "bfloat16",
    "gradient_accumulation_steps": 2,
    "versions": {"torch": "2.11.0", "diffusers": "0.42.1"},
}


def measure(memory=True):
    """Steps that take exactly COST seconds and MEMORY GiB (none where the device cannot tell)."""
    return [
        Measurement(
            shape, tokens, batch, float(COST.seconds(batch, tokens)), float(memory * MEMORY.gib(batch, tokens))
        )
        for shape, batches in BATCH_SIZES.items()
        for tokens in [TokenGeometry().tokens(LatentShape.parse(shape))]
        for batch in batches
    ]


def fit_config(measurements, model=MODEL, environment=ENVIRONMENT):
    from adaptiveload_hf import BucketConfig

    return BucketConfig.from_measurements(measurements, model=model, environment=environment, geometry=TokenGeometry())


@functools.cache
def _fitted_fields():
    return dict(fit_config(measure()).config)


def make_config(environment=ENVIRONMENT):
    """The config of `measure()`; fitted once in a process, since that takes a second."""
    from adaptiveload_hf import BucketConfig

    return BucketConfig(**{**_fitted_fields(), "environment": environment}, measurements=measure())


def save_dataset(folder, counts):
    """The part of a prepared dataset that plans are made from: its column of latent shapes."""
    import datasets

    sizes = [[16, *map(int, shape.split("x"))] for shape, count in counts.items() for _ in range(count)]
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"latent_shape": sizes}).save_to_disk(str(folder / "dataset"))
