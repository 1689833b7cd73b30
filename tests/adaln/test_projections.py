"""Do projections with LoRA give what calling them does, and are they called where they do more?"""

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.layer import Linear as LoraLinear
from support.tiny_models import output_and_gradients, relative_error, tiny_inputs, tiny_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from adaptiveload_hf import patch_model, unpatch_model
from adaptiveload_hf.adaln import projections
from adaptiveload_hf.adaln.projections import is_tested_lora, project

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Projections(nn.Module):
    """Three linears of one input, one of them without bias."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v = nn.Linear(8, 12), nn.Linear(8, 12, bias=False), nn.Linear(8, 4)

    def forward(self, x):
        return torch.cat([self.to_q(x), self.to_k(x), self.to_v(x)], dim=-1)


def together(model, x):
    return torch.cat(project(x, model.to_q, model.to_k, model.to_v), dim=-1)


def make(lora=True, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = Projections().to(dtype)
    if lora:
        targets = options.pop("targets", ["to_q", "to_k"])
        config = LoraConfig(r=2, lora_alpha=6, target_modules=targets, init_lora_weights=False, **options)
        model = inject_adapter_in_model(config, model).to(dtype)
    return model


def make_x(dtype=torch.float32):
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def gradients(output, model, x):
    """The output, and the gradients of x and of every parameter that is trained."""
    leaves = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape).to(output)
    return [output, *torch.autograd.grad(output, leaves, weights)]


@pytest.fixture
def linears_called(monkeypatch):
    """Counts the calls of PEFT's linears."""
    calls = []
    original = LoraLinear.forward
    monkeypatch.setattr(LoraLinear, "forward", lambda self, x: calls.append(1) or original(self, x))
    monkeypatch.setattr(projections, "is_tested_lora", lambda cls, _: cls is LoraLinear)
    return calls


@pytest.mark.parametrize("frozen", [False, True], ids=["all trained", "base frozen"])
def test_output_and_every_gradient_are_those_of_the_calls(frozen, linears_called):
    model, x = make(), make_x()
    model.to_q.requires_grad_(not frozen)
    expected = gradients(model(x), model, x)
    linears_called.clear()
    for found, truth in zip(gradients(together(model, x), model, x), expected, strict=True):
        assert relative_error(found, truth) < 1e-6
    assert not linears_called


def test_only_outputs_that_were_used_get_a_gradient():
    model, x = make(), make_x()
    query, _, _ = project(x, model.to_q, model.to_k, model.to_v)
    query.sum().backward()
    assert model.to_k.lora_A["default"].weight.grad is None and model.to_v.weight.grad is None
    found, x.grad = x.grad, None
    model.to_q(x).sum().backward()
    assert relative_error(found, x.grad) < 1e-6


def test_an_output_may_be_edited_in_place_as_a_linears(linears_called):
    model, x = make(), make_x()
    (output,) = project(x, model.to_q)
    assert not linears_called
    for got, truth in zip(gradients(output.mul_(2), model.to_q, x), gradients(model.to_q(x).mul_(2), model.to_q, x)):
        assert relative_error(got, truth) < 1e-6


def test_second_derivatives_are_right():
    model, x = make(dtype=torch.float64), make_x(torch.float64)

    def of(x, up, down):
        model.to_q.lora_A["default"].weight, model.to_q.lora_B["default"].weight = down, up
        return together(model, x)

    adapter = model.to_q.lora_B["default"].weight, model.to_q.lora_A["default"].weight
    assert torch.autograd.gradgradcheck(of, (x, *adapter), fast_mode=True)


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_is_no_further_from_float64_than_the_calls(device):
    errors = {Projections.forward: 0.0, together: 0.0}
    for seed in range(8):
        torch.manual_seed(seed)
        model, x = make(dtype=torch.bfloat16).to(device), torch.randn(2, 64, 8).to(device, torch.bfloat16)
        exact_model, exact_x = copy.deepcopy(model).double(), x.double().requires_grad_()
        exact = gradients(exact_model(exact_x), exact_model, exact_x)
        for call in errors:
            found = gradients(call(model, x.requires_grad_()), model, x)
            errors[call] += sum(relative_error(one, truth) for one, truth in zip(found, exact, strict=True))
    assert errors[together] < 1.02 * errors[Projections.forward]


def test_under_autocast_adapters_in_float32_are_lowered_as_autocast_does():
    model, x = make(), make_x(torch.bfloat16)
    for linear in (model.to_q.base_layer, model.to_k.base_layer, model.to_v):
        linear.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(model(x), model, x)
        found = gradients(together(model, x), model, x)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert relative_error(one, other) < 1e-2


def hooked(model):
    model.to_q.lora_A["default"].register_forward_hook(lambda *_: None)


def hooked_base(model):
    model.to_v.register_forward_pre_hook(lambda *_: None)


def subclassed(model):
    model.to_v = type("Quantized", (nn.Linear,), {})(8, 4)


def with_a_second_adapter(model):
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_q"]), model, adapter_name="second")
    model.to_q.set_adapter(["default", "second"])


def merged(model):
    model.to_q.merge()


def switched_off(model):
    model.to_q.enable_adapters(False)


def of_another_dtype(model):
    model.to_q.lora_B["default"].double()
    model.to_q.lora_A["default"].double()


def kept_elsewhere(model):
    """As FSDP's first version keeps parameters: in one flat tensor, of which modules have plain views."""
    base = model.to_q.base_layer
    weight = base.weight.detach().clone()
    del base.weight
    base.weight = weight


def bias_kept_elsewhere(model):
    bias = model.to_v.bias.detach().clone()
    del model.to_v.bias
    model.to_v.bias = bias


def hooked_dropout(model):
    model.to_q.lora_dropout["default"].register_forward_hook(lambda *_: None)


def scaled_by_a_tensor(model):
    model.to_q.scaling["default"] = torch.tensor(3.0, requires_grad=True)


CHANGES = [hooked, hooked_base, subclassed, with_a_second_adapter, merged, switched_off, of_another_dtype]
CHANGES += [hooked_dropout, scaled_by_a_tensor]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_not_plain_is_called(change, linears_called):
    model, x = make(), make_x()
    change(model)
    expected = model(x)
    linears_called.clear()
    assert torch.equal(together(model, x), expected)
    assert len(linears_called) == 2


@pytest.mark.parametrize("change", [kept_elsewhere, bias_kept_elsewhere], ids=lambda change: change.__name__)
def test_a_weight_that_something_keeps_elsewhere_is_found_there(change, linears_called):
    """FSDP 1 keeps them elsewhere when it recomputes only: what is saved may not depend on that."""
    model, x = make(), make_x()
    change(model)
    expected = model(x)
    linears_called.clear()
    assert relative_error(together(model, x), expected) < 1e-6
    assert not linears_called


@pytest.mark.parametrize("options", [{"lora_dropout": 0.5}, {"use_dora": True}, {"lora_bias": True}], ids=str)
def test_other_kinds_of_lora_are_called(options, linears_called):
    model, x = make(**options), make_x()
    linears_called.clear()
    together(model, x)
    assert linears_called


def test_linears_are_called_where_autocast_lowers_their_input(linears_called):
    model, x = make(), make_x()
    with torch.autocast("cpu", torch.bfloat16):
        together(model, x)
    assert len(linears_called) == 2


class PassingMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_mode_around_the_forward_alone_leaves_checkpointing_right():
    model, x = make(), make_x()
    expected = gradients(model(x), model, x)
    with PassingMode():
        output = checkpoint(together, model, x, use_reentrant=False)
    for found, truth in zip(gradients(output, model, x), expected, strict=True):
        assert relative_error(found, truth) < 1e-6


def test_selective_checkpointing_and_compile_see_every_product():
    model, x = make(), make_x()
    expected = gradients(model(x), model, x)

    def keep_products():
        return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default, torch.ops.aten.mm.default])

    kept = checkpoint(together, model, x, use_reentrant=False, context_fn=keep_products)
    compiled = torch.compile(together, backend="eager", fullgraph=True)(model, x)
    for output in (kept, compiled):
        for found, truth in zip(gradients(output, model, x), expected, strict=True):
            assert relative_error(found, truth) < 1e-6


def test_linears_without_lora_are_called(monkeypatch):
    monkeypatch.setattr(projections, "_Project", None)
    model, x = make(lora=False), make_x()
    assert torch.equal(together(model, x), model(x))


def test_a_linear_whose_forward_was_replaced_is_called(monkeypatch, linears_called):
    model, x = make(), make_x()
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight.t() + 1)
    assert torch.equal(together(model, x), model(x))
    assert linears_called


def test_a_forward_that_peft_gets_after_the_first_call_is_called(monkeypatch):
    model, x = make(), make_x()
    together(model, x)
    original = LoraLinear.forward
    monkeypatch.setattr(LoraLinear, "forward", lambda self, x: 2 * original(self, x))
    assert torch.equal(together(model, x), model(x))


@pytest.mark.parametrize("patched_first", [True, False], ids=["patched first", "patched last"])
def test_wans_attention_calls_no_linear_with_lora(patched_first, linears_called):
    model, inputs = tiny_model("wan"), tiny_inputs("wan")
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    for patch in (True, False) if patched_first else (False, True):
        if patch:
            patch_model(model)
        else:
            model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    output, found = output_and_gradients(model, inputs)
    assert not linears_called
    unpatch_model(model)
    expected_output, expected = output_and_gradients(model, inputs)
    assert linears_called
    assert relative_error(output, expected_output) < 1e-5
    for name, gradient in expected.items():
        if gradient.norm() > 1e-4:  # the gradient of a key's bias is all rounding
            assert relative_error(found[name], gradient) < 1e-5, name


def test_the_tested_lora_is_the_installed_one():
    """A new PEFT may change its forward: look at the change, then put the new digest into the table."""
    assert is_tested_lora(LoraLinear, LoraLinear.forward)


def test_lora_whose_state_peft_reads_otherwise_is_not_the_tested_one(monkeypatch):
    monkeypatch.setattr(LoraLinear, "merged", property(lambda self: bool(self.merged_adapters) and not self.training))
    assert not is_tested_lora.__wrapped__(LoraLinear, LoraLinear.forward)
