"""Does a patch survive what people do to models? Patched before and after, where the order matters."""

import copy
import io

import accelerate
import pytest
import torch
from diffusers import FirstBlockCacheConfig, FlowMatchEulerDiscreteScheduler, WanPipeline
from diffusers.hooks import apply_group_offloading
from peft import LoraConfig
from support.tiny_models import output_and_gradients, relative_error, tiny_inputs, tiny_model
from torch.utils.checkpoint import checkpoint

from adaptiveload_hf import patch_model, patched, unpatch_model

BOTH = pytest.mark.parametrize("family", ["wan", "sd35"])
ORDERS = pytest.mark.parametrize("patch_first", [True, False], ids=["patch first", "patch last"])
CPU = torch.device("cpu")


def output_of(model, family):
    with torch.no_grad():
        return model(**tiny_inputs(family), return_dict=False)[0]


def rewritten_blocks(model):
    """How many modules hold the rewritten forward directly (not below a hook)."""
    return sum(hasattr(module.forward, "rewritten") for module in model.modules())


@BOTH
def test_a_deep_copy_runs_its_own_weights(family):
    model = tiny_model(family)
    expected = output_of(model, family)
    patch_model(model)
    twin = copy.deepcopy(model)
    assert rewritten_blocks(twin) == rewritten_blocks(model) > 0
    torch.testing.assert_close(output_of(twin, family), expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert output_of(twin, family).abs().max() == 0
    torch.testing.assert_close(output_of(model, family), expected)


@BOTH
def test_save_pretrained_and_from_pretrained_give_the_unpatched_model(family, tmp_path):
    model = tiny_model(family)
    expected = output_of(model, family)
    with patched(model):
        model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert list(loaded.state_dict()) == list(model.state_dict())
    assert torch.equal(output_of(loaded.train(), family), expected)
    patch_model(loaded)
    torch.testing.assert_close(output_of(loaded, family), expected)


@BOTH
def test_torch_save_keeps_the_patch(family):
    model = tiny_model(family)
    patch_model(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert rewritten_blocks(loaded) == rewritten_blocks(model)
    assert torch.equal(output_of(loaded, family), output_of(model, family))
    unpatch_model(loaded)
    assert rewritten_blocks(loaded) == 0


@BOTH
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_gradient_checkpointing_gives_the_same_gradients(family, reentrant, autocast):
    model, inputs = tiny_model(family), tiny_inputs(family)
    model.enable_gradient_checkpointing(lambda f, *args: checkpoint(f, *args, use_reentrant=reentrant))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output, gradients = output_and_gradients(model, inputs)
        patch_model(model)
        patched_output, patched_gradients = output_and_gradients(model, inputs)
    assert patched_output.dtype == output.dtype
    limit = 3e-2 if autocast else 1e-5
    assert relative_error(patched_output, output) < limit
    flat, patched_flat = (torch.cat([g[n].flatten() for n in gradients]) for g in (gradients, patched_gradients))
    assert relative_error(patched_flat, flat) < limit


@BOTH
@ORDERS
def test_lora_trains_and_keeps_its_keys(family, patch_first):
    def prepared(patch):
        model = tiny_model(family)
        if patch and patch_first:
            patch_model(model)
        torch.manual_seed(0)
        targets = ["to_q", "to_v", "norm1.linear", "norm1_context.linear"] if family == "sd35" else ["to_q", "to_v"]
        model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
        if patch and not patch_first:
            patch_model(model)
        return model

    inputs = tiny_inputs(family)
    model = prepared(patch=True)
    output, gradients = output_and_gradients(prepared(patch=False), inputs)
    patched_output, patched_gradients = output_and_gradients(model, inputs)
    assert rewritten_blocks(model) > 0
    assert relative_error(patched_output, output) < 1e-5
    assert patched_gradients.keys() == gradients.keys()
    assert all("lora" in name for name in gradients)
    for name, gradient in gradients.items():
        assert relative_error(patched_gradients[name], gradient) < 1e-5, name
    model.disable_adapters()
    torch.testing.assert_close(output_of(model, family), output_of(tiny_model(family), family))


def offload_with_accelerate(model):
    accelerate.cpu_offload(model, execution_device=CPU)


def offload_groups_of_blocks(model):
    options = {"offload_type": "block_level", "num_blocks_per_group": 1}
    apply_group_offloading(model, onload_device=CPU, offload_device=CPU, **options)


def offload_leaves(model):
    apply_group_offloading(model, onload_device=CPU, offload_device=CPU, offload_type="leaf_level")


def cast_layers(model):
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def hooked_modules(model):
    return sum(hasattr(m, "_hf_hook") or bool(getattr(m, "_diffusers_hook", None)) for m in model.modules())


@BOTH
@ORDERS
@pytest.mark.parametrize("add_hooks", [offload_with_accelerate, offload_groups_of_blocks, offload_leaves, cast_layers])
def test_hooks_stay_in_force(family, add_hooks, patch_first):
    model, unpatched = tiny_model(family), tiny_model(family)
    add_hooks(unpatched)
    if patch_first:
        patch_model(model)
    add_hooks(model)
    if not patch_first:
        assert patch_model(model).instances_patched > 0
    assert hooked_modules(model) == hooked_modules(unpatched) > 0
    expected = output_of(unpatched, family)
    assert relative_error(output_of(model, family), expected) < 1e-5
    unpatch_model(model)
    assert torch.equal(output_of(model, family), expected)


@ORDERS
def test_first_block_cache_keeps_working(patch_first):
    model = tiny_model("wan").eval()
    expected = output_of(model, "wan")
    if patch_first:
        patch_model(model)
    model.enable_cache(FirstBlockCacheConfig(threshold=1e6))
    if not patch_first:
        patch_model(model)
    with model.cache_context("cond"):
        torch.testing.assert_close(output_of(model, "wan"), expected)
        other = tiny_inputs("wan", seed=1)
        with torch.no_grad():
            reused = model(**other, return_dict=False)[0]
    unpatch_model(model)
    model.disable_cache()
    with torch.no_grad():
        assert relative_error(reused, model(**other, return_dict=False)[0]) > 1e-3  # the cache was in force


def test_a_pipeline_with_two_transformers_is_patched_as_a_whole():
    first, second = tiny_model("wan"), tiny_model("wan", seed=1)
    parts = {"tokenizer": None, "text_encoder": None, "vae": None, "scheduler": FlowMatchEulerDiscreteScheduler()}
    pipeline = WanPipeline(**parts, transformer=first, transformer_2=second)
    patch_model(pipeline)
    assert rewritten_blocks(first) == rewritten_blocks(second) == 2
    unpatch_model(pipeline)
    assert rewritten_blocks(first) == rewritten_blocks(second) == 0
