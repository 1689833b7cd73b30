"""Do SD3's, Flux's and HunyuanVideo's attention give the same with the norms of heads fused, and is the rest left?"""

import copy
import inspect
import pickle

import pytest
import torch
from diffusers.models import embeddings
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from diffusers.models.transformers import transformer_flux
from diffusers.models.transformers.transformer_flux import FluxAttention
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0
from peft import LoraConfig
from support.tiny_models import output_and_gradients, relative_error, tiny_inputs, tiny_model
from torch import nn

from adaptiveload_hf import UserError, patch_model, unpatch_model
from adaptiveload_hf.adaln import attention, ops
from adaptiveload_hf.adaln.attention import (
    TESTED_JOINT_PROCESSORS,
    TESTED_ROTATION,
    AdaptiveLoadJointAttnProcessor,
)
from adaptiveload_hf.adaln.source import running_source

HEADS, HEAD_WIDTH, TOKENS, TEXT = 3, 8, 7, 5
WIDTH = HEADS * HEAD_WIDTH


@pytest.fixture
def fused_calls(monkeypatch):
    """Counts the calls of the op."""
    calls = []
    original = ops.rms_norm_rope
    monkeypatch.setattr(ops, "rms_norm_rope", lambda *a, **options: calls.append(1) or original(*a, **options))
    return calls


def make_attention(dtype=torch.float32, processor=JointAttnProcessor2_0, **options):
    torch.manual_seed(0)
    options = {"qk_norm": "rms_norm", "eps": 1e-6, "context_pre_only": False, **options}
    sizes = {"query_dim": WIDTH, "heads": HEADS, "dim_head": HEAD_WIDTH, "out_dim": WIDTH, "bias": True}
    attn = Attention(processor=processor(), **sizes, **{"added_kv_proj_dim": WIDTH, **options})
    with torch.no_grad():
        for parameter in attn.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return attn.to(dtype)


def run(attn, dtype=torch.float32, text=True, turned=False, before=0):
    """The outputs, and the gradients of both inputs and of every parameter. before: tokens of text that are turned."""
    generator = torch.Generator().manual_seed(1)
    place = attn.to_q.weight.device
    x, y = (torch.randn(2, n, WIDTH, generator=generator).to(place, dtype).requires_grad_() for n in (TOKENS, TEXT))
    rotation = {}
    if "image_rotary_emb" in inspect.signature(attn.processor.__call__).parameters and turned:
        angles = (
            torch.rand(before + TOKENS, HEAD_WIDTH // 2, generator=generator).repeat_interleave(2, dim=-1).to(place)
        )
        rotation = {"image_rotary_emb": (angles.cos(), angles.sin())}
    outputs = attn(x, encoder_hidden_states=y if text else None, **rotation)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = [torch.linspace(-1, 1, out.numel()).view(out.shape).to(out) for out in outputs]
    leaves = {"x": x, "y": y, **dict(attn.named_parameters())}
    gradients = torch.autograd.grad(outputs, list(leaves.values()), weights, allow_unused=True)
    found = {name: gradient for name, gradient in zip(leaves, gradients) if gradient is not None}
    return {**{f"output {i}": out for i, out in enumerate(outputs)}, **found}


def assert_close(found, expected, limit=1e-5):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor.norm() > 1e-4:  # the gradient of a key's bias is all rounding
            assert relative_error(found[name], tensor) < limit, name


@pytest.mark.parametrize("text", [True, False], ids=["joint", "dual"])
@pytest.mark.parametrize("options", [{}, {"context_pre_only": True}, {"qk_norm": None}], ids=str)
def test_outputs_and_all_gradients_equal_the_stock_ones(options, text, fused_calls):
    attn = make_attention(**options)
    expected = run(attn, text=text)
    assert attention.install(attn, "auto") is None
    assert_close(run(attn, text=text), expected)
    assert len(fused_calls) == (0 if "qk_norm" in options else 4 if text else 2)


FLUX_BLOCKS = {
    "double block": {"added_kv_proj_dim": WIDTH, "context_pre_only": False},
    "single block": {"pre_only": True},
}


def make_flux_attention(kind):
    torch.manual_seed(0)
    attn = FluxAttention(WIDTH, HEADS, HEAD_WIDTH, bias=True, out_dim=WIDTH, **FLUX_BLOCKS[kind])
    with torch.no_grad():
        for parameter in attn.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return attn


@pytest.mark.parametrize("kind", FLUX_BLOCKS)
def test_fluxs_outputs_and_gradients_equal_the_stock_ones_with_text_and_image_turned(kind, fused_calls):
    attn, double = make_flux_attention(kind), kind == "double block"
    expected = run(attn, text=double, turned=True, before=TEXT if double else 0)
    assert attention.op_of(attn) == "rms_norm_rope"
    assert attention.install(attn, "auto") is None
    assert_close(run(attn, text=double, turned=True, before=TEXT if double else 0), expected)
    assert len(fused_calls) == (4 if double else 2)


@pytest.mark.parametrize("kind", FLUX_BLOCKS)
def test_a_rotation_that_is_not_the_tested_one_is_called(kind, fused_calls, monkeypatch):
    attn, double, calls = make_flux_attention(kind), kind == "double block", []
    before = TEXT if double else 0

    def other(x, freqs_cis, sequence_dim):
        calls.append(x.shape[sequence_dim])
        return 2 * embeddings.apply_rotary_emb(x, freqs_cis, sequence_dim=sequence_dim)

    monkeypatch.setattr(transformer_flux, "apply_rotary_emb", other)
    expected = run(attn, text=double, turned=True, before=before)
    attention.install(attn, "auto")
    assert_close(run(attn, text=double, turned=True, before=before), expected)
    assert calls == [TOKENS + before] * 4
    assert len(fused_calls) == (4 if double else 2)  # the norms, without turning


SINGLE = {"added_kv_proj_dim": None, "context_pre_only": None, "pre_only": True}


@pytest.mark.parametrize("options", [{}, SINGLE], ids=["double block", "single block"])
def test_hunyuan_videos_outputs_and_gradients_equal_the_stock_ones(options, fused_calls):
    attn = make_attention(processor=HunyuanVideoAttnProcessor2_0, **options)
    expected = run(attn, turned=True)
    assert attention.op_of(attn) == "rms_norm_rope"
    assert attention.install(attn, "auto") is None
    assert_close(run(attn, turned=True), expected)
    assert len(fused_calls) == (2 if options else 4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bfloat16_is_closer_to_float64_than_the_stock_processor(device):
    attn = make_attention(torch.bfloat16).to(device)
    exact = run(copy.deepcopy(attn).double(), torch.float64)
    names = [name for name, tensor in exact.items() if tensor.norm() > 1e-2]
    stock = run(attn, torch.bfloat16)
    attention.install(attn, "auto")
    ours = run(attn, torch.bfloat16)
    assert {name: t.dtype for name, t in ours.items()} == {name: t.dtype for name, t in stock.items()}
    stock_error, ours_error = (sum(relative_error(each[n], exact[n]) for n in names) for each in (stock, ours))
    assert ours_error < stock_error


def hooked(attn):
    attn.norm_k.register_forward_hook(lambda module, args, output: 2 * output)


def with_own_forward(attn):
    attn.norm_q.forward = lambda x: x + 1


def with_layer_norm(attn):
    attn.norm_q = nn.LayerNorm(HEAD_WIDTH)


@pytest.mark.parametrize("change", [hooked, with_own_forward, with_layer_norm], ids=lambda change: change.__name__)
def test_a_norm_that_is_not_plain_is_called(change, fused_calls):
    attn = make_attention()
    change(attn)
    expected = run(attn)
    attention.install(attn, "auto")
    assert_close(run(attn), expected)
    assert len(fused_calls) == 3


def test_patching_wraps_them_all_and_unpatching_gives_the_very_same_back(fused_calls):
    model, inputs = tiny_model("sd35"), tiny_inputs("sd35")
    before, expected = model.attn_processors, output_and_gradients(model, inputs)
    report = patch_model(model)
    row = next(row for row in report.to_dict()["classes"] if row["class"].endswith(".Attention"))
    assert row["attention_fused"] == row["attention_found"] == len(before)
    output, gradients = output_and_gradients(model, inputs)
    assert fused_calls
    assert relative_error(output, expected[0]) < 1e-5
    assert_close(gradients, expected[1])
    unpatch_model(model)
    assert all(model.attn_processors[name] is processor for name, processor in before.items())


@pytest.mark.parametrize("family", ["wan", "sd35", "flux"])
def test_diffusers_makes_processors_anew_as_if_they_were_not_wrapped(family):
    """As it does where IP-Adapters come and go: `processor.__class__()`."""
    model, inputs = tiny_model(family), tiny_inputs(family)
    expected = model(**inputs)[0]
    kinds = {name: type(processor) for name, processor in model.attn_processors.items()}
    patch_model(model)
    wrapped = copy.deepcopy(pickle.loads(pickle.dumps(model))).attn_processors
    anew = {name: processor.__class__() for name, processor in wrapped.items()}
    assert {name: type(processor) for name, processor in anew.items()} == kinds
    model.set_attn_processor(anew)
    assert relative_error(model(**inputs)[0], expected) < 1e-5
    unpatch_model(model)
    assert torch.equal(model(**inputs)[0], expected)


def test_a_wrapper_that_comes_back_after_unpatching_runs_the_stock_processor(fused_calls):
    """As where `unfuse_qkv_projections` puts processors back that it had set aside."""
    model, inputs = tiny_model("sd35"), tiny_inputs("sd35")
    expected = model(**inputs)[0]
    patch_model(model)
    aside = model.attn_processors
    model.set_attn_processor(JointAttnProcessor2_0())
    unpatch_model(model)
    model.set_attn_processor(aside)
    assert torch.equal(model(**inputs)[0], expected)
    assert not fused_calls


def test_without_the_op_the_processors_stay():
    model = tiny_model("sd35")
    patch_model(model, ops=["layer_norm_modulate", "gate_residual"])
    assert {type(processor) for processor in model.attn_processors.values()} == {JointAttnProcessor2_0}


def test_lora_trains_the_same(fused_calls):
    model, inputs = tiny_model("sd35"), tiny_inputs("sd35")
    targets = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj"]
    model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    expected = output_and_gradients(model, inputs)
    patch_model(model)
    output, gradients = output_and_gradients(model, inputs)
    assert relative_error(output, expected[0]) < 1e-5
    assert_close(gradients, expected[1])


def test_it_compiles_to_one_graph_of_the_stock_processor(fused_calls):
    torch._dynamo.reset()
    attn = make_attention()
    expected = run(attn)
    attention.install(attn, "auto")
    attn.compile(fullgraph=True, backend="aot_eager")
    assert_close(run(attn), expected)
    assert not fused_calls


def test_the_tested_processors_are_the_installed_ones():
    """A new diffusers may change them: look at the change, then put the new digest into the table."""
    assert {cls: running_source(cls.__call__).digest for cls in TESTED_JOINT_PROCESSORS} == TESTED_JOINT_PROCESSORS
    assert running_source(embeddings.apply_rotary_emb).digest == TESTED_ROTATION


def test_another_processor_cannot_be_wrapped():
    with pytest.raises(
        UserError,
        match=r"of SD3, Flux or HunyuanVideo as .*found diffusers\S*\.HunyuanVideo15AttnProcessor2_0\. Keep that proc",
    ):
        AdaptiveLoadJointAttnProcessor(HunyuanVideo15AttnProcessor2_0())
