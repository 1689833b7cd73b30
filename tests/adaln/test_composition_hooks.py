"""Do hooks of diffusers and accelerate stay in force on a patched model, and its results what they were?"""

import accelerate
import pytest
import torch
from diffusers import (
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    MagCacheConfig,
    StableDiffusion3Pipeline,
    WanPipeline,
)
from diffusers.hooks import apply_group_offloading
from support.compositions import BOTH, ORDERS, cells_of, composed, fused_ops, plain_ops, same_refusal
from support.tiny_models import relative_error, tiny_inputs, tiny_model

from adaptiveload_hf import AdaptiveLoadAttnProcessor, patch_model, unpatch_model

CPU = torch.device("cpu")


@torch.no_grad()
def run(model, family, seed=0):
    output, ops = fused_ops(model, **tiny_inputs(family, seed=seed), return_dict=False)
    return output[0], ops


def offload_with_accelerate(model):
    accelerate.cpu_offload(model, execution_device=CPU)


def offload_groups_of_blocks(model):
    options = {"offload_type": "block_level", "num_blocks_per_group": 1}
    apply_group_offloading(model, onload_device=CPU, offload_device=CPU, **options)


def offload_leaves(model):
    apply_group_offloading(model, onload_device=CPU, offload_device=CPU, offload_type="leaf_level")


def cast_layers(model):
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


HOOKS = {
    "accelerate.cpu_offload": offload_with_accelerate,
    "group offload of blocks": offload_groups_of_blocks,
    "group offload of leaves": offload_leaves,
    "layerwise fp8 casting": cast_layers,
}


def hooked_modules(model):
    return sum(hasattr(m, "_hf_hook") or bool(getattr(m, "_diffusers_hook", None)) for m in model.modules())


@BOTH
@ORDERS
@pytest.mark.parametrize("row", HOOKS)
def test_hooks_stay_in_force(row, family, patch_first, record):
    unpatched = composed(family, HOOKS[row], None)
    model = composed(family, HOOKS[row], patch_first)
    assert hooked_modules(model) == hooked_modules(unpatched) > 0
    expected, _ = run(unpatched, family)
    output, ops = run(model, family)
    assert relative_error(output, expected) < 1e-5
    record(row, cells_of(family, patch_first, ops, plain_ops(family)))
    unpatch_model(model)
    assert torch.equal(run(model, family)[0], expected)


CACHES = {
    "FirstBlockCache": lambda: FirstBlockCacheConfig(threshold=1e6),
    "MagCache": lambda: MagCacheConfig(num_inference_steps=4, retention_ratio=0.25, mag_ratios=torch.ones(4)),
}


@BOTH
@ORDERS
@pytest.mark.parametrize("row", CACHES)
def test_caches(row, family, patch_first, record):
    def cached(order):
        return composed(family, lambda model: model.eval().enable_cache(CACHES[row]()), order)

    if family == "sd35":
        record(row, same_refusal(family, patch_first, cached))
        return
    model = cached(patch_first)
    with model.cache_context("cond"):
        output, ops = run(model, family)
        torch.testing.assert_close(output, run(tiny_model(family).eval(), family)[0])
        reused, fewer_ops = run(model, family, seed=1)
    assert fewer_ops.total() < ops.total()
    unpatch_model(model)
    model.disable_cache()
    assert relative_error(reused, run(model, family, seed=1)[0]) > 1e-3, "the cache was not in force"
    record(row, cells_of(family, patch_first, ops, plain_ops(family)))


def pipeline_of(family, *transformers):
    empty = {"tokenizer": None, "text_encoder": None, "vae": None, "scheduler": FlowMatchEulerDiscreteScheduler()}
    if family == "wan":
        return WanPipeline(**empty, transformer=transformers[0], transformer_2=transformers[1])
    more = {"tokenizer_2": None, "text_encoder_2": None, "tokenizer_3": None, "text_encoder_3": None}
    return StableDiffusion3Pipeline(**empty, **more, transformer=transformers[0])


@BOTH
@ORDERS
def test_a_pipeline_is_patched_with_all_its_transformers(family, patch_first, record):
    models = [tiny_model(family, seed) for seed in range(2 if family == "wan" else 1)]
    expected = [run(model, family)[0] for model in models]
    if patch_first:
        for model in models:
            patch_model(model)
    pipeline = pipeline_of(family, *models)
    if not patch_first:
        patch_model(pipeline)
    for model, truth in zip(models, expected):
        output, ops = run(model, family)
        assert relative_error(output, truth) < 1e-5
        assert ops == plain_ops(family)
    record("pipeline with one or two transformers", cells_of(family, patch_first, ops, plain_ops(family)))
    unpatch_model(pipeline)
    for model, truth in zip(models, expected):
        output, ops = run(model, family)
        assert torch.equal(output, truth) and not ops


def set_processor(model):
    model.set_attn_processor(AdaptiveLoadAttnProcessor())


@pytest.mark.parametrize("row", HOOKS)
def test_an_attention_processor_set_by_hand_works_under_hooks(row):
    expected, _ = run(composed("wan", HOOKS[row], None), "wan")
    for steps in ((set_processor, HOOKS[row]), (HOOKS[row], set_processor)):
        model = tiny_model("wan")
        for step in steps:
            step(model)
        assert relative_error(run(model, "wan")[0], expected) < 1e-5
