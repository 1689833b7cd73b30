"""Does a patched model train as an unpatched one under what people train with? Patched before and after it."""

import collections
import functools
import gc
import weakref

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, get_peft_model
from support.compositions import (
    BOTH,
    ORDERS,
    cells_of,
    composed,
    fused_ops,
    largest_error,
    plain_ops,
    run_and_count,
    same_refusal,
)
from support.tiny_models import relative_error, tiny_inputs, tiny_model
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from adaptiveload_hf import patch_model


def change_under_autocast(family, patch, output, gradients):
    """Relative changes of output and gradients from those of the model by itself."""
    alone = tiny_model(family)
    if patch:
        patch_model(alone)
    with torch.autocast("cpu", torch.bfloat16):
        expected, expected_gradients, _ = run_and_count(alone, tiny_inputs(family))
    return relative_error(output, expected), largest_error(gradients, expected_gradients)


def check_training(row, record, family, compose, patch_first, autocast=False):
    """One step agrees with the unpatched one's in output, dtype and every gradient; the fused ops run."""
    inputs, models = tiny_inputs(family), [composed(family, compose, order) for order in (None, patch_first)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output, gradients, no_ops = run_and_count(models[0], inputs)
        patched_output, patched_gradients, ops = run_and_count(models[1], inputs)
    assert not no_ops and gradients
    assert patched_output.dtype == output.dtype
    if autocast:  # roundings differ: the composition changes a patched model no more than it does an unpatched one
        change = change_under_autocast(family, False, output, gradients)
        patched_change = change_under_autocast(family, True, patched_output, patched_gradients)
        assert all(ours <= max(2 * theirs, 1e-5) for ours, theirs in zip(patched_change, change))
    else:
        assert relative_error(patched_output, output) < 1e-5
        assert largest_error(patched_gradients, gradients) < 1e-5
    record(row, cells_of(family, patch_first, ops, plain_ops(family, enabled=autocast, dtype=torch.bfloat16)))


@BOTH
@ORDERS
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_gradient_checkpointing(family, reentrant, autocast, patch_first, record):
    def compose(model):
        model.enable_gradient_checkpointing(lambda f, *args: checkpoint(f, *args, use_reentrant=reentrant))

    row = "gradient checkpointing" + ", reentrant" * reentrant + ", autocast" * autocast
    check_training(row, record, family, compose, patch_first, autocast)


def keep(ctx, op, *args, kept, **kwargs):
    return CheckpointPolicy.MUST_SAVE if kept(op) else CheckpointPolicy.PREFER_RECOMPUTE


def is_fused_op(op):
    return op.namespace == "adaptiveload"


def is_matrix_product(op):
    return op.name() in ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product_flash_attention_for_cpu")


def checkpoint_selectively(model, kept):
    contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(keep, kept=kept))
    model.enable_gradient_checkpointing(
        lambda f, *args: checkpoint(f, *args, use_reentrant=False, context_fn=contexts)
    )


@BOTH
@ORDERS
@pytest.mark.parametrize("kept", [is_matrix_product, is_fused_op], ids=["matrix products", "fused ops"])
def test_selective_checkpointing(family, kept, patch_first, record):
    compose = functools.partial(checkpoint_selectively, kept=kept)
    row = f"selective checkpointing that keeps {'fused ops' if kept is is_fused_op else 'matrix products'}"
    check_training(row, record, family, compose, patch_first)


@BOTH
@pytest.mark.parametrize(("kept", "again"), [(is_fused_op, False), (is_matrix_product, True)])
def test_fused_ops_that_a_policy_keeps_are_not_computed_again(family, kept, again):
    model = composed(family, functools.partial(checkpoint_selectively, kept=kept), True)
    (output,), ops = fused_ops(model, **tiny_inputs(family), return_dict=False)
    _, backward_ops = fused_ops(output.square().mean().backward)
    recomputed = {op: n for op, n in backward_ops.items() if not op.endswith("_backward")}
    assert bool(recomputed) is again
    assert {op.removesuffix("_backward") for op in backward_ops} == set(ops)


def add_lora(model):
    torch.manual_seed(0)
    targets = ["to_q", "to_k", "to_v", "to_out.0", "proj", "norm1.linear", "norm1_context.linear", "net.2"]
    model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))


@BOTH
@ORDERS
def test_lora(family, patch_first, record):
    check_training("LoRA, also on the modulation's linears", record, family, add_lora, patch_first)
    model = composed(family, add_lora, patch_first)
    unpatched = composed(family, add_lora, None)
    assert list(model.state_dict()) == list(unpatched.state_dict())
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == [name for name, parameter in unpatched.named_parameters() if parameter.requires_grad]
    assert trained and all("lora" in name for name in trained)


@BOTH
def test_a_loss_that_outlives_its_model_holds_no_frozen_weight_and_can_be_differentiated_twice_before(family):
    model = composed(family, add_lora, True)
    frozen = [weakref.ref(p) for p in model.parameters() if not p.requires_grad]
    trained = [p for p in model.parameters() if p.requires_grad]
    loss = model(**tiny_inputs(family), return_dict=False)[0].square().mean()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in trained]
    loss.backward()
    torch.testing.assert_close([p.grad for p in trained], [2 * gradient for gradient in once])
    del model
    gc.collect()
    assert frozen and not any(weight() is not None for weight in frozen)


@BOTH
@ORDERS
def test_an_adapter_that_is_switched_off_leaves_the_base_model(family, patch_first, record):
    model, inputs = composed(family, add_lora, patch_first), tiny_inputs(family)
    model.disable_adapters()
    output, ops = fused_ops(model, **inputs, return_dict=False)
    torch.testing.assert_close(output[0], tiny_model(family)(**inputs, return_dict=False)[0])
    record("LoRA switched off", cells_of(family, patch_first, ops, plain_ops(family)))
    model.enable_adapters()
    assert relative_error(model(**inputs, return_dict=False)[0], output[0]) > 1e-2


@BOTH
@ORDERS
def test_a_merged_adapter_is_in_the_weights(family, patch_first, record):
    inputs = tiny_inputs(family)
    unpatched = composed(family, add_lora, None)
    expected = unpatched(**inputs, return_dict=False)[0]
    model = composed(family, add_lora, patch_first)
    model.fuse_lora()
    model.unload_lora()
    assert list(model.state_dict()) == list(tiny_model(family).state_dict())
    output, ops = fused_ops(model, **inputs, return_dict=False)
    assert relative_error(output[0], expected) < 1e-5
    record("LoRA merged into the weights", cells_of(family, patch_first, ops, plain_ops(family)))


@BOTH
@ORDERS
def test_a_saved_adapter_has_the_keys_of_an_unpatched_model_and_loads(family, patch_first, record, tmp_path):
    for name, order in (("patched", True), ("unpatched", None)):
        composed(family, add_lora, order).save_lora_adapter(tmp_path / name)
    saved = [
        safetensors.torch.load_file(tmp_path / name / "pytorch_lora_weights.safetensors")
        for name in ("patched", "unpatched")
    ]
    assert list(saved[0]) == list(saved[1]) and saved[0]
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[1])

    def load(model):
        model.load_lora_adapter(tmp_path / "patched", prefix=None, weight_name="pytorch_lora_weights.safetensors")

    inputs = tiny_inputs(family)
    expected = composed(family, add_lora, None)(**inputs, return_dict=False)[0]
    output, ops = fused_ops(composed(family, load, patch_first), **inputs, return_dict=False)
    assert relative_error(output[0], expected) < 1e-5
    record("LoRA saved and loaded", cells_of(family, patch_first, ops, plain_ops(family)))


@BOTH
@ORDERS
def test_pefts_own_wrapper(family, patch_first, record):
    def compose(model):
        torch.manual_seed(0)
        saved = ["proj_out" if family == "wan" else "norm_out"]
        config = LoraConfig(r=2, target_modules=["to_q", "to_v"], modules_to_save=saved, init_lora_weights=False)
        return get_peft_model(model, config)

    check_training("PEFT's get_peft_model", record, family, compose, patch_first)


@BOTH
@ORDERS
def test_fused_projections(family, patch_first, record):
    def run(order):
        model = composed(family, lambda model: model.fuse_qkv_projections(), order)
        return fused_ops(model, **tiny_inputs(family), return_dict=False)

    if family == "wan":
        (expected,), _ = run(None)
        (output,), ops = run(patch_first)
        assert relative_error(output, expected) < 1e-5
        cells = cells_of(family, patch_first, ops, plain_ops(family))
    else:  # diffusers fuses the second attention's projections, whose processor does not know of it
        cells = same_refusal(family, patch_first, run)
    record("fused projections", cells)


@BOTH
@ORDERS
def test_saved_tensors_on_the_cpu(family, patch_first, record):
    with torch.autograd.graph.save_on_cpu():
        check_training("saved tensors on the CPU", record, family, lambda model: None, patch_first)


@BOTH
@ORDERS
def test_torch_func_differentiates_the_original_expressions(family, patch_first, record):
    def gradients(order):
        model = composed(family, lambda model: None, order)
        arguments = {**tiny_inputs(family), "return_dict": False}

        def loss(parameters):
            return torch.func.functional_call(model, parameters, kwargs=arguments)[0].square().mean()

        return fused_ops(torch.func.grad(loss), {name: p.detach() for name, p in model.named_parameters()})

    (expected, _), (found, ops) = gradients(None), gradients(patch_first)
    assert largest_error(found, expected) < 1e-5
    record("torch.func.grad", cells_of(family, patch_first, ops, plain_ops(family)))


@BOTH
@ORDERS
def test_an_exported_program_is_the_unpatched_models(family, patch_first, record):
    model = composed(family, lambda model: model.eval(), patch_first)
    arguments = {**tiny_inputs(family), "return_dict": False}
    program = torch.export.export(model, (), kwargs=arguments)
    assert torch.equal(program.module()(**arguments)[0], tiny_model(family).eval()(**arguments)[0])
    targets = [str(node.target) for node in program.graph.nodes]
    ops = collections.Counter(name.split(".")[1] for name in targets if name.startswith("adaptiveload"))
    record("torch.export", cells_of(family, patch_first, ops, plain_ops(family)))
