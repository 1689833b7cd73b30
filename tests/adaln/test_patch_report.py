"""What does patch_model accept, refuse and say?"""

import json

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.normalization import AdaLayerNormZero
from diffusers.models.transformers import transformer_wan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel, WanTransformerBlock
from peft import LoraConfig
from support.compositions import fused_ops
from support.tiny_models import tiny_inputs, tiny_model
from torch import nn

from adaptiveload_hf import UserError, patch_model, patched, unpatch_model
from adaptiveload_hf.adaln import attention, extension, forwards, ops
from adaptiveload_hf.adaln import patch as patch_module


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.kind = "modulated"

    def forward(self, x, gate):
        if self.kind == "modulated" or not self.kind:
            x = self.norm(x) * (1 + gate)
        elif self.kind in ("gated", "twice"):
            x = x + gate * self.norm(x)
        return x


class OwnBlock(WanTransformerBlock):
    def forward(self, *args):
        return super().forward(*args) * 2


class OwnModel(WanTransformer3DModel):
    def forward(self, *args, **kwargs):
        return WanTransformer3DModel.forward(self, *args, **kwargs)


class Mixed(nn.Module):
    """One site that is fused, one that is not, and one that an RMS norm takes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.rms = nn.RMSNorm(8, eps=1e-6)

    def forward(self, x, scale, shift, gate):
        normed = self.norm(x)
        x = normed * (1 + scale) + shift + normed
        return x + gate * (self.rms(x) * (1 + scale))


def test_the_printed_report_is_a_sentence_and_a_table_without_empty_columns():
    lines = str(patch_model(tiny_model("sd35"))).splitlines()
    assert lines[0] == "Fused: 15 of 15 modulations, 15 of 15 gates, 9 of 9 pairs, 5 of 5 attention processors."
    cells = [[cell.strip() for cell in line.split("|")] for line in lines if "|" in line]
    assert cells == [
        ["class", "instances", "modulations", "gates", "pairs", "attention", "how"],
        ["JointTransformerBlock", "3", "6/6", "15/15", "9/9", "", "rewritten (tested source)"],
        ["SD35AdaLayerNormZeroX", "2", "4/4", "", "", "", "rewritten (tested source)"],
        ["AdaLayerNormZero", "3", "3/3", "", "", "", "rewritten (tested source)"],
        ["Attention", "5", "", "", "", "5/5", "processor wrapped"],
        ["AdaLayerNormContinuous", "2", "2/2", "", "", "", "rewritten (tested source)"],
    ]


@pytest.fixture
def untested_top_level(monkeypatch):
    """Wan's own forward, apart from its blocks', in a version that no test covers."""
    monkeypatch.delitem(forwards.TESTED_SOURCES, "transformers.transformer_wan.WanTransformer3DModel")
    forwards._made_once.cache_clear()
    yield
    forwards._made_once.cache_clear()


def test_what_stays_eager_stands_last_in_the_table_and_its_reasons_below(untested_top_level):
    lines = str(patch_model(tiny_model("wan"))).splitlines()
    assert lines[0].startswith("Fused: 4 of 5 modulations, 4 of 4 gates, 2 of 2 norms, 4 of 4 pairs, 4 of 4 attention")
    classes = [line.partition(" ")[0] for line in lines if "|" in line]
    assert classes == ["class", "WanTransformerBlock", "WanAttention", "WanTransformer3DModel"]
    reasons = lines[lines.index("Left eager:") + 1 :]
    assert len(reasons) == 1 and reasons[0].startswith("  WanTransformer3DModel: a model's top-level forward")
    assert max(len(line) for line in lines if "|" in line) < 120


def test_the_report_says_what_stays_eager_and_why(untested_top_level):
    report = patch_model(tiny_model("wan"))
    row = next(row for row in report.to_dict()["classes"] if row["class"].endswith("WanTransformer3DModel"))
    assert (row["how"], row["modulations_fused"], row["modulations_found"]) == ("eager", 0, 1)
    assert "top-level forward" in row["left_eager"][0]

    row = patch_model(Mixed()).to_dict()["classes"][0]
    assert (row["modulations_fused"], row["modulations_found"]) == (1, 2)
    assert (row["gates_fused"], row["gates_found"]) == (1, 1)
    assert row["left_eager"] == ["normed * (1 + scale) + shift: normed is used otherwise too"]


def test_a_forward_that_a_subclass_calls_is_named_and_left():
    model, inputs = tiny_model("wan"), {**tiny_inputs("wan"), "return_dict": False}
    model.__class__ = OwnModel
    model.blocks[0].__class__ = OwnBlock
    expected = model(**inputs)[0]
    report = patch_model(model)
    blocks = next(row for row in report.to_dict()["classes"] if row["class"].endswith("WanTransformerBlock"))
    assert (blocks["instances"], blocks["pairs_fused"], blocks["pairs_found"]) == (2, 2, 4)
    assert "WanTransformerBlock: the forward of OwnBlock calls it" in str(report)
    assert "WanTransformer3DModel: the forward of OwnModel calls it" in str(report)
    torch.testing.assert_close(model(**inputs)[0], expected)


def test_what_a_setting_never_lets_run_is_no_site_and_runs_as_written_should_it_change():
    block, (x, scale) = Chosen(), torch.randn(2, 2, 5, 8)
    row = patch_model(block, verify="never").to_dict()["classes"][0]
    assert [row[f"{kind}_found"] for kind in ("modulations", "gates")] == [1, 0]
    assert set(fused_ops(block, x, scale)[1]) == {"layer_norm_modulate"}
    block.kind = "gated"
    found, ops = fused_ops(block, x, scale)
    assert torch.equal(found, Chosen.forward(block, x, scale)) and not ops
    with pytest.raises(UserError, match=r"found nothing to patch .*no adaptive layer norm or gated residual"):
        patch_model(BasicTransformerBlock(8, 1, 8))  # as in a UNet: its `norm_type` says that its norms are plain


def test_the_report_says_where_each_op_runs_and_why_the_extension_is_missing(monkeypatch):
    monkeypatch.setattr(patch_module, "extension_missing_reason", lambda: "not built: do this")
    report = patch_model(Mixed())
    assert "\nevery operation: reference on cpu\n" in str(report)
    assert "CUDA extension not used: not built: do this" in str(report)
    assert report.to_dict()["extension_missing"] == "not built: do this"
    assert "every operation: reference\n" in str(patch_model(Mixed(), backend="reference"))


def test_the_report_is_plain_data_too():
    report = patch_model(tiny_model("wan"))
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()


def test_the_generated_code_is_shown_by_class_or_its_name():
    model = tiny_model("wan")
    report = patch_model(model)
    source = report.source("WanTransformerBlock")
    assert source == report.source("diffusers.models.transformers.transformer_wan.WanTransformerBlock")
    assert source == report.source(type(model.blocks[0]))
    assert "_adaln.modulate(self.norm1, hidden_states, scale=scale_msa, scale_table=scale_table, " in source
    assert "or ((self.norm1(hidden_states.float()) * (1 + (scale_msa.float() + scale_table)) + " in source
    with pytest.raises(
        UserError, match=r"no class Attention was patched\. These were: WanTransformer3DModel, WanTransformerBlock"
    ):
        report.source("Attention")


def test_only_the_ops_asked_for_are_used():
    gates = patch_model(tiny_model("wan"), ops=["gate_residual"]).to_dict()
    assert [(row["modulations_fused"], row["gates_fused"]) for row in gates["classes"]] == [(0, 0), (0, 4)]
    assert "its op was not asked for" in str(gates)
    assert list(gates["backends"]) == ["gate_residual"]
    row = patch_model(Mixed(), ops="rms_norm_modulate").to_dict()["classes"][0]
    assert (row["modulations_fused"], row["gates_fused"]) == (1, 0)
    with pytest.raises(UserError, match="its op was not asked for"):
        patch_model(AdaLayerNormZero(8), ops="rms_norm_modulate")


def test_patching_again_replaces_the_patch():
    model = tiny_model("wan")
    patch_model(model, ops="gate_residual")
    patch_model(model)
    assert "_adaln.modulate" in patch_model(model).source("WanTransformerBlock")
    unpatch_model(model)
    assert not any("forward" in vars(module) for module in model.modules())
    unpatch_model(model)


def test_the_context_manager_unpatches_even_after_an_error():
    model = tiny_model("wan")
    with pytest.raises(ZeroDivisionError), patched(model, backend="reference") as report:
        assert report.instances_patched == 7  # two blocks of two attentions, and the whole
        raise ZeroDivisionError
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_context_manager_refuses_a_model_that_it_would_leave_unpatched():
    model = tiny_model("wan")
    patch_model(model)
    with pytest.raises(UserError, match="patched already"), patched(model):
        pass
    assert "forward" in vars(model.blocks[0])


@pytest.mark.parametrize("lora_first", [True, False])
def test_lora_that_the_tests_do_not_cover_is_said_to_run_as_peft_wrote_it(lora_first, monkeypatch):
    model = tiny_model("wan")
    if lora_first:
        model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k"]))
    report = patch_model(model)
    if not lora_first:
        model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k"]))
    assert "LoRA" not in str(report)
    monkeypatch.setattr(attention, "is_tested_lora", lambda cls, _: False)
    assert "WanAttention: its LoRA layers (Linear) run as PEFT wrote them" in str(report)
    unpatch_model(model)
    assert "LoRA" not in str(report)


@pytest.mark.parametrize("name", ["_get_qkv_projections", "dispatch_attention_fn"])
def test_helpers_of_attention_that_the_tests_do_not_cover_are_said_to_be_called(name, monkeypatch):
    original = getattr(transformer_wan, name)
    monkeypatch.setattr(transformer_wan, name, lambda *args, **options: [*original(*args, **options)])
    assert f"WanAttention: its processor calls {name} as it would unpatched" in str(patch_model(tiny_model("wan")))


def test_a_bare_module_is_patched_as_well():
    norm = AdaLayerNormZero(8)
    assert patch_model(norm).instances_patched == 1


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Plain(), {}, r"found nothing to patch in Plain \(no adaptive layer norm or gated residual in Plain\)"),
        (nn.Linear(2, 2), {}, "torch modules alone"),
        ("a path", {}, "expected an nn.Module or a diffusers pipeline, found str"),
        (nn.DataParallel(Mixed()), {}, "found nn.DataParallel, whose replicas share one forward"),
        (Mixed(), {"backend": "hip"}, "backend must be one of auto, cuda, triton, reference, but it is 'hip'"),
        (Mixed(), {"verify": True}, "verify must be one of auto, always, never, but it is True"),
        (Mixed(), {"ops": ["rope"]}, "but it names rope"),
        (Mixed(), {"ops": []}, "but it names nothing"),
        (Mixed(), {"ops": None}, "but it names None"),
        (Mixed(), {"ops": [1, "rope"]}, "but it names 1, rope"),
        (Mixed(), {"ops": "rms_norm_rope"}, r"Mixed: [^\[]*: its op was not asked for[^\]]*\)\.$"),
    ],
)
def test_what_cannot_be_done_is_said(model, options, message):
    with pytest.raises(UserError, match=message):
        patch_model(model, **options)


def test_a_pipeline_without_transformer_is_refused():
    class Pipeline:
        def __init__(self):
            self.components = {"unet": Mixed(), "vae": Mixed()}

    with pytest.raises(UserError, match="expected a pipeline with a transformer, but Pipeline has unet, vae"):
        patch_model(Pipeline())


def test_a_module_with_components_of_its_own_is_no_pipeline():
    model = Mixed()
    model.components = {"unet": None}
    assert patch_model(model).instances_patched


def test_the_cuda_backend_is_refused_where_it_cannot_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match='backend="cuda" needs a GPU, and torch sees none here'):
        patch_model(Mixed(), backend="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(patch_module, "extension_missing_reason", lambda: "it holds no code for GPU 0")
    with pytest.raises(UserError, match="needs the CUDA extension, which is missing: it holds no code for GPU 0"):
        patch_model(Mixed(), backend="cuda")


def test_an_extension_for_another_gpu_is_named_when_the_model_is_patched_and_not_at_the_first_step(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a new GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(torch.ops.adaptiveload, "device_error", lambda device: 209, raising=False)
    monkeypatch.setattr(extension, "load_problem", None)
    monkeypatch.setattr(ops.registry, "replace_extension", lambda names: None)  # the dispatcher would keep it
    extension.device_problem.cache_clear()
    named = "it holds no code for GPU 0, a new GPU (sm_100, CUDA error 209); build it again on this machine with "
    report = patch_model(Mixed())
    with pytest.raises(UserError) as refused:
        patch_model(Mixed(), backend="cuda")
    extension.device_problem.cache_clear()
    assert f"CUDA extension not used: {named}TORCH_CUDA_ARCH_LIST=10.0" in str(report)
    instead = "triton" if ops.registry.has_triton else "reference"
    assert f"every operation: reference on cpu, {instead} on cuda" in str(report)
    assert named in str(refused.value)


def test_the_triton_backend_is_refused_where_it_cannot_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match='backend="triton" needs a GPU, and torch sees none here'):
        patch_model(Mixed(), backend="triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(patch_module, "has_triton", False)
    with pytest.raises(UserError, match=r'backend="triton" needs Triton, which is not installed\.'):
        patch_model(Mixed(), backend="triton")


def test_without_extension_and_triton_the_report_says_that_the_reference_runs_and_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(patch_module, "extension_missing_reason", lambda: "not built")
    monkeypatch.setattr(ops, "extension_missing_reason", lambda: "not built")
    for triton, shown in ((True, "triton on cuda"), (False, "reference on cuda (Triton is not installed)")):
        monkeypatch.setattr(ops.registry, "has_triton", triton)
        report = str(patch_model(Mixed(), ops="gate_residual"))
        assert f"gate_residual: reference on cpu, {shown}\n" in report
        assert "\nCUDA extension not used: not built\n" in report


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_with_a_gpu_backend_tensors_elsewhere_run_as_written(monkeypatch, backend):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(patch_module, "extension_missing_reason", lambda: None)
    monkeypatch.setattr(patch_module, "has_triton", True)
    model = tiny_model("wan")
    expected = model(**tiny_inputs("wan"), return_dict=False)[0]
    report = patch_model(model, backend=backend)
    assert report.backends == dict.fromkeys(ops.OPS, backend)
    assert torch.equal(model(**tiny_inputs("wan"), return_dict=False)[0], expected)
