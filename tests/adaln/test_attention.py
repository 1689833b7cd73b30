"""Does AdaptiveLoadAttnProcessor compute what Wan's own processor does, and leave alone what it does not know?"""

import copy
import io

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from diffusers.models.transformers import transformer_wan
from peft import LoraConfig
from support.tiny_models import output_and_gradients, relative_error, tiny_inputs, tiny_model
from support.wan_attention import (
    CLASSES,
    HEAD_WIDTH,
    HEADS,
    TOKENS,
    assert_close,
    make_attention,
    make_inputs,
    run,
    with_lora,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from adaptiveload_hf import AdaptiveLoadAttnProcessor, UserError, patch_model, unpatch_model
from adaptiveload_hf.adaln import ops, queries
from adaptiveload_hf.adaln.attention import TESTED_DISPATCH, TESTED_NATIVE, TESTED_PROCESSORS, TESTED_PROJECTIONS
from adaptiveload_hf.adaln.source import running_source


@pytest.fixture
def fused_calls(monkeypatch):
    """Collects the names of the norms' ops as they are called, by themselves or within an operation."""
    calls = []

    def collect(module, name, named):
        original = getattr(module, name)

        def collecting(*args, **options):
            calls.append(named(args))
            return original(*args, **options)

        monkeypatch.setattr(module, name, collecting)

    for op in ("rms_norm_rope", "rms_norm_modulate"):
        collect(ops, op, lambda args, op=op: op)
    collect(queries, "run", lambda args: args[0])
    return calls


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("fused", [False, True], ids=["three projections", "one projection"])
def test_self_attention_and_all_its_gradients_equal_the_stock_ones(family, fused, fused_calls):
    attn, inputs = make_attention(family), make_inputs()
    if fused:
        attn.fuse_projections()
    expected = run(attn, **inputs)
    attn.set_processor(AdaptiveLoadAttnProcessor(attn.processor))
    assert_close(run(attn, **inputs), expected)
    assert fused_calls == ["rms_norm_rope"] * 2


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("fused", [False, True], ids=["two projections", "one projection"])
@pytest.mark.parametrize("text", [False, True], ids=["self-attention", "cross-attention"])
def test_attention_without_rotation_and_all_its_gradients_equal_the_stock_ones(text, fused, family, fused_calls):
    options = {"cross_attention_dim_head": HEAD_WIDTH} if text else {}
    attn, inputs = make_attention(family, **options), make_inputs() | {"rotary_emb": None}
    if text:
        inputs["encoder_hidden_states"] = torch.randn(2, 5, HEADS * HEAD_WIDTH, requires_grad=True)
    if fused:
        attn.fuse_projections()
    expected = run(attn, **inputs)
    attn.set_processor(AdaptiveLoadAttnProcessor(attn.processor))
    assert_close(run(attn, **inputs), expected)
    assert fused_calls == ["rms_norm_modulate"] * 2


def test_the_tested_processors_are_those_installed():
    """A new diffusers release may change a processor: look at the change, then put the new digest into the table."""
    calls = [processor.__call__ for _, processor in CLASSES.values()]
    assert {running_source(call).digest for call in calls} == TESTED_PROCESSORS
    helpers = [call.__globals__["_get_qkv_projections"] for call in calls]
    assert {running_source(helper).digest for helper in helpers} == TESTED_PROJECTIONS


def test_the_tested_dispatch_of_attention_is_the_one_installed():
    assert running_source(attention_dispatch.dispatch_attention_fn).digest in TESTED_DISPATCH
    assert {running_source(attention_dispatch._native_attention).digest} == TESTED_NATIVE


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("change", ["nothing", "backend", "mask", "checks", "another dispatch"])
def test_diffusers_dispatch_is_asked_where_it_might_do_more_than_call_pytorchs_attention(change, lora, monkeypatch):
    attn, inputs = make_attention(), make_inputs()
    attn = with_lora(attn, ("to_q", "to_out.0")) if lora else attn
    if change == "mask":
        inputs["attention_mask"] = torch.zeros(2, 1, TOKENS, TOKENS).masked_fill_(torch.eye(TOKENS).bool(), -1e4)
    expected = run(attn, **inputs)
    processor = AdaptiveLoadAttnProcessor(attn.processor)
    attn.set_processor(processor)
    calls, original = [], attention_dispatch.dispatch_attention_fn
    if change == "another dispatch":
        monkeypatch.setattr(
            transformer_wan, "dispatch_attention_fn", lambda *args, **options: original(*args, **options) * 1
        )
    elif change == "checks":
        monkeypatch.setattr(_AttentionBackendRegistry, "_checks_enabled", True)
    elif change == "backend":
        processor._attention_backend = "_native_math"
    backends = _AttentionBackendRegistry._supported_arg_names
    monkeypatch.setattr(_AttentionBackendRegistry, "_supported_arg_names", Asked(backends, calls))
    assert_close(run(attn, **inputs), expected)
    assert bool(calls) == (change != "nothing")


class Asked(dict):
    """Notes when diffusers' dispatch looks up what a backend takes."""

    def __init__(self, items, calls):
        super().__init__(items)
        self._calls = calls

    def __getitem__(self, key):
        self._calls.append(key)
        return super().__getitem__(key)


def test_a_backend_set_around_the_forward_alone_goes_with_checkpointing():
    attn, inputs = with_lora(make_attention(), ("to_q", "to_out.0")), make_inputs()
    attn.set_processor(AdaptiveLoadAttnProcessor(attn.processor))
    parameters = [parameter for parameter in attn.parameters() if parameter.requires_grad]
    expected = torch.autograd.grad(attn(**inputs).square().sum(), parameters)
    with attention_dispatch.attention_backend("_native_flash"):  # by PyTorch's choice it is the recomputation's, too
        output = checkpoint(attn, use_reentrant=False, **inputs)
    for found, truth in zip(torch.autograd.grad(output.square().sum(), parameters), expected, strict=True):
        assert relative_error(found, truth) < 1e-5


@pytest.mark.parametrize("change", ["p", "hook"])
def test_dropout_after_attention_is_called_where_it_does_anything(change):
    attn, inputs = make_attention(), make_inputs()
    attn.set_processor(AdaptiveLoadAttnProcessor(attn.processor))
    output = attn(**inputs)
    if change == "p":
        attn.to_out[1].p = 1.0
    else:
        attn.to_out[1].register_forward_hook(lambda module, args, y: y * 0)
    assert output.any() and not attn(**inputs).any()


@pytest.mark.parametrize("family", ["wan", "wan_i2v"])
def test_one_processor_serves_a_whole_model_with_image_keys_and_cross_attention(family, fused_calls):
    model, inputs = tiny_model(family), tiny_inputs(family)
    output, gradients = output_and_gradients(model, inputs)
    model.set_attn_processor(AdaptiveLoadAttnProcessor())
    found, found_gradients = output_and_gradients(model, inputs)
    assert relative_error(found, output) < 1e-5
    assert_close(found_gradients, gradients)
    model.fuse_qkv_projections()
    assert relative_error(model(**inputs, return_dict=False)[0], output) < 1e-5


def test_bfloat16_is_closer_to_float64_than_the_stock_processor(fused_calls):
    stock_error = ours_error = 0
    for seed in range(4):
        attn, inputs = make_attention().bfloat16(), make_inputs(torch.bfloat16)
        with torch.no_grad():
            for parameter in attn.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.1)
        exact_inputs = {
            "hidden_states": inputs["hidden_states"].detach().double().requires_grad_(),
            "rotary_emb": tuple(t.double() for t in inputs["rotary_emb"]),
        }
        exact = run(copy.deepcopy(attn).double(), **exact_inputs)
        names = [name for name in exact if name not in ("to_k.bias",)]
        stock = run(attn, **inputs)
        attn.set_processor(AdaptiveLoadAttnProcessor())
        ours = run(attn, **inputs)
        assert all(ours[name].dtype == torch.bfloat16 for name in names)
        stock_error += sum(relative_error(stock[name], exact[name]) for name in names)
        ours_error += sum(relative_error(ours[name], exact[name]) for name in names)
    assert ours_error <= 1.02 * stock_error, (ours_error, stock_error)


def hooked(attn):
    attn.norm_k.register_forward_hook(lambda module, args, output: 2 * output)


def without_norm(attn):
    attn.norm_q = nn.Identity()


def without_weight(attn):
    attn.norm_q = nn.RMSNorm(HEADS * HEAD_WIDTH, eps=1e-6, elementwise_affine=False)


def with_default_eps(attn):
    attn.norm_q.eps = None


def with_layer_norm(attn):
    attn.norm_k = nn.LayerNorm(HEADS * HEAD_WIDTH)


def with_own_forward(attn):
    attn.norm_q.forward = lambda x: x + 1


@pytest.mark.parametrize(
    "change", [hooked, without_norm, without_weight, with_default_eps, with_layer_norm, with_own_forward]
)
def test_with_other_norms_or_hooks_on_them_the_stock_processor_runs_alone(change, fused_calls):
    attn, inputs = make_attention(), make_inputs()
    change(attn)
    expected = run(attn, **inputs)
    attn.set_processor(AdaptiveLoadAttnProcessor())
    found = run(attn, **inputs)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not fused_calls


@pytest.mark.parametrize("case", ["cross-attention with rotation", "autocast", "float64", "mixed dtypes", "hook"])
def test_calls_that_the_op_does_not_take_run_as_written(case, fused_calls):
    attn, inputs = make_attention(), make_inputs()
    if case == "cross-attention with rotation":
        attn = make_attention(cross_attention_dim_head=HEAD_WIDTH)
        inputs["encoder_hidden_states"] = torch.randn(2, TOKENS, HEADS * HEAD_WIDTH)
    elif case == "float64":
        attn, inputs["hidden_states"] = attn.double(), inputs["hidden_states"].detach().double().requires_grad_()
    elif case == "mixed dtypes":
        attn.norm_q.bfloat16()
    elif case == "hook":
        handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        expected = attn(**inputs)
        attn.set_processor(AdaptiveLoadAttnProcessor())
        found = attn(**inputs)
    if case == "hook":
        handle.remove()
    assert torch.equal(found, expected)
    assert not fused_calls


def test_patching_wraps_stock_processors_and_unpatching_gives_the_very_same_back():
    model = tiny_model("wan")
    before = model.attn_processors
    report = patch_model(model)
    row = next(row for row in report.to_dict()["classes"] if row["class"].endswith(".WanAttention"))
    assert (row["attention_fused"], row["attention_found"], row["instances"]) == (4, 4, 4)
    assert row["how"] == "processor wrapped"
    assert {type(processor) for processor in model.attn_processors.values()} == {AdaptiveLoadAttnProcessor}
    unpatch_model(model)
    assert all(model.attn_processors[name] is processor for name, processor in before.items())


class OwnProcessor(transformer_wan.WanAttnProcessor):
    pass


def test_a_processor_of_the_users_own_is_left_and_listed():
    model = tiny_model("wan")
    own = model.blocks[0].attn1.processor = OwnProcessor()
    report = patch_model(model)
    row = next(row for row in report.to_dict()["classes"] if row["class"].endswith(".WanAttention"))
    assert (row["attention_fused"], row["attention_found"]) == (3, 4)
    assert row["left_eager"] == ["its attention processor is OwnProcessor, not the stock one"]
    assert model.blocks[0].attn1.processor is own
    unpatch_model(model)
    assert model.blocks[0].attn1.processor is own


def test_what_the_user_set_survives_patch_and_unpatch():
    model, processor = tiny_model("wan"), AdaptiveLoadAttnProcessor()
    model.set_attn_processor(processor)
    patch_model(model)
    unpatch_model(model)
    assert all(found is processor for found in model.attn_processors.values())


def test_the_op_alone_can_be_asked_for_or_left_out():
    model = tiny_model("wan")
    assert patch_model(model, ops="rms_norm_rope").instances_patched == 4
    patch_model(model, ops=["layer_norm_modulate", "gate_residual"])
    assert not any(isinstance(p, AdaptiveLoadAttnProcessor) for p in model.attn_processors.values())


def test_attention_backend_and_parallel_configuration_are_the_stock_processors(monkeypatch):
    # diffusers makes it the default of every later model too
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", _AttentionBackendRegistry._active_backend)
    model, config = tiny_model("wan"), object()
    stock = model.blocks[0].attn1.processor
    model.set_attention_backend("native")
    stock._parallel_config = config
    patch_model(model)
    processor = model.blocks[0].attn1.processor
    assert processor._attention_backend == "native" and processor._parallel_config is config
    processor._parallel_config = None
    model.set_attention_backend("_native_math")
    unpatch_model(model)
    assert stock._attention_backend == "_native_math" and stock._parallel_config is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: torch.load(saved(model), weights_only=False)])
def test_copies_and_pickles_keep_the_processor_and_can_be_unpatched(copied):
    model = tiny_model("wan")
    patch_model(model)
    twin = copied(model)
    inputs = tiny_inputs("wan")
    assert torch.equal(twin(**inputs, return_dict=False)[0], model(**inputs, return_dict=False)[0])
    assert isinstance(twin.blocks[1].attn1.processor, AdaptiveLoadAttnProcessor)
    assert twin.blocks[1].attn1.processor is not model.blocks[1].attn1.processor
    unpatch_model(twin)
    assert type(twin.blocks[1].attn1.processor) is transformer_wan.WanAttnProcessor


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return buffer


def test_lora_on_every_projection_trains_the_same_and_a_wrapped_norm_stays_eager(fused_calls):
    results = []
    for patch in (False, True):
        model = tiny_model("wan")
        torch.manual_seed(0)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        config = LoraConfig(r=2, target_modules=targets, modules_to_save=["norm_q"], init_lora_weights=False)
        model.add_adapter(config)
        model.blocks[1].attn1.norm_q = model.blocks[1].attn1.norm_q.original_module.requires_grad_(False)
        if patch:
            patch_model(model)
        results.append(output_and_gradients(model, tiny_inputs("wan")))
    (output, gradients), (patched_output, patched_gradients) = results
    assert relative_error(patched_output, output) < 1e-5
    assert_close(patched_gradients, gradients)
    assert len(fused_calls) == 2  # of the second block


def test_it_compiles_to_one_graph_with_the_op_in_it():
    torch._dynamo.reset()
    attn, inputs = make_attention(), make_inputs()
    expected = run(attn, **inputs)
    attn.set_processor(AdaptiveLoadAttnProcessor())
    counter = CompileCounterWithBackend("aot_eager")
    attn.compile(fullgraph=True, backend=counter)
    assert_close(run(attn, **inputs), expected)
    assert counter.frame_count == 1
    targets = [str(node.target) for node in counter.graphs[0].graph.nodes]
    assert targets.count("adaptiveload.rms_norm_rope.default") == 2


def test_what_cannot_be_wrapped_is_refused_with_its_name():
    with pytest.raises(UserError, match=r"found \S*test_attention\.OwnProcessor\. Keep that processor"):
        AdaptiveLoadAttnProcessor(OwnProcessor())
    with pytest.raises(UserError, match=r"backend must be one of auto, cuda.*, but it is 'fast'"):
        AdaptiveLoadAttnProcessor(backend="fast")
