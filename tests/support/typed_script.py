"""What a user's editor and type checker see of the public names. `make lint` checks this file; nobody runs it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from typing_extensions import assert_type

from adaptiveload_hf import (
    AdaptiveLoadAttnProcessor,
    BucketBatchSampler,
    BucketConfig,
    BucketDataLoader,
    BucketPlan,
    EpochSchedule,
    LatentShape,
    Measurement,
    PatchReport,
    TokenGeometry,
    TrainingMonitor,
    UserError,
    dual_constraint_batch_size,
    fit_cost_model,
    fit_memory_model,
    load_latent_folder,
    load_prepared,
    load_tar_shards,
    make_accelerator,
    make_plan,
    measure_steps,
    model_input_dtype,
    patch_model,
    patched,
    register_adapter,
    schedule_epoch,
    source_digest,
    unpatch_model,
)
from adaptiveload_hf.buckets.cost import CostModel, MemoryModel
from adaptiveload_hf.buckets.points import Point


def patch(model: torch.nn.Module) -> None:
    assert_type(patch_model(model, backend="reference"), PatchReport)
    with patched(model) as report:
        assert_type(report, PatchReport)
        assert_type(report.source("WanTransformerBlock"), str)
    unpatch_model(model)
    register_adapter("module.Block", sources={"forward": source_digest(patch)}, edits=[("a", "b")])
    AdaptiveLoadAttnProcessor(backend="auto")


def load(model: torch.nn.Module, config: BucketConfig) -> None:
    accelerator = make_accelerator(gradient_accumulation_steps=2)
    assert_type(accelerator, Accelerator)
    assert_type(model_input_dtype(accelerator), torch.dtype)
    dataset = load_prepared("prepared")
    assert_type(dataset, Dataset)
    assert_type(load_latent_folder(Path("cache"), latent_normalized=True), tuple[Dataset, list[str]])
    assert_type(load_tar_shards("shards", latent_normalized=True), tuple[Dataset, list[str]])
    loader = BucketDataLoader(dataset, config, accelerator=accelerator, batch_sizes={"1x60x104": 4})
    BucketDataLoader(dataset, config, accelerator=accelerator, memory_limit=70)  # type: ignore[call-arg]
    assert_type(loader.global_step_after(2), int)
    assert_type(loader.plan, BucketPlan)
    monitor = TrainingMonitor(accelerator, model, loader)
    for batch in monitor:
        metrics = monitor.micro_step_done(batch["latent"].mean() * batch["loss_weight"])
        if metrics is not None:
            print(monitor.status_line(metrics))


def share(measurements: Sequence[Measurement], geometry: TokenGeometry) -> BucketConfig:
    config = BucketConfig.from_measurements(measurements, model={}, environment={}, geometry=geometry)
    assert_type(config.push_to_hub("user/repo"), str)
    assert_type(config.plan({LatentShape(1, 60, 104): 8}, world_size=8), BucketPlan)
    return BucketConfig.from_pretrained("user/repo", revision="trial")


def plan(measurements: Sequence[Measurement], index: np.ndarray) -> EpochSchedule:
    cost = fit_cost_model(measurements).model
    memory = fit_memory_model(measurements)
    assert_type(cost, CostModel)
    assert_type(memory, MemoryModel)
    made = make_plan({LatentShape.parse("21x60x104"): 4}, cost, memory, memory_limit_gib=80, world_size=8)
    assert_type(dual_constraint_batch_size(1560, m_mem=75_600, m_comp=1e9, p=2.0), int)
    sampler = BucketBatchSampler(index, made, cost, world_size=8)
    assert_type(sampler.schedule, EpochSchedule)
    return schedule_epoch(index, made, cost, world_size=8)


try:
    measure_steps(make_accelerator(), lambda shape, batch_size: None, [Point(LatentShape(1, 60, 104), 1560, 4)])
except UserError as error:
    print(error)
