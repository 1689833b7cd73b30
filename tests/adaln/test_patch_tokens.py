"""Is the convolution that makes tokens of patches one matrix product where it may be, and called where not?"""

import pytest
import torch
from support.tiny_models import output_and_gradients, relative_error, tiny_inputs, tiny_model
from torch import nn
from torch._dynamo.testing import CompileCounter

from adaptiveload_hf import patch_model
from adaptiveload_hf.adaln.patch_tokens import is_product, patch_tokens, product_of_patches

CONVOLUTIONS = {
    "video": (lambda: nn.Conv3d(4, 10, (1, 2, 2), stride=(1, 2, 2)), (2, 4, 3, 6, 8)),
    "frames in pairs, no bias": (lambda: nn.Conv3d(4, 10, (2, 2, 1), stride=(2, 2, 1), bias=False), (1, 4, 4, 6, 5)),
    "image": (lambda: nn.Conv2d(3, 5, 2, stride=2), (2, 3, 4, 6)),
}


def tokens(convolution, x):
    return convolution(x).flatten(2).transpose(1, 2)


@pytest.mark.parametrize(("make", "shape"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_the_product_of_patches_is_the_convolution_with_all_its_gradients(make, shape):
    torch.manual_seed(0)
    convolution, x = make(), torch.randn(shape, requires_grad=True)
    assert is_product(convolution, x)
    outputs = [call(convolution, x) for call in (tokens, product_of_patches)]
    weights = torch.randn_like(outputs[0])
    leaves = [x, *convolution.parameters()]
    for expected, found in zip(*[[y, *torch.autograd.grad(y, leaves, weights)] for y in outputs], strict=True):
        assert relative_error(found, expected) < 1e-6
    assert outputs[1].is_contiguous()


def test_products_of_many_sizes_are_one_graph():
    torch._dynamo.reset()
    convolution, graphs = nn.Conv2d(3, 5, 2, stride=2), CompileCounter()
    compiled = torch.compile(product_of_patches, fullgraph=True, dynamic=True, backend=graphs)
    for shape in ((2, 3, 4, 6), (3, 3, 8, 4), (4, 3, 6, 10)):
        x = torch.randn(shape)
        assert relative_error(compiled(convolution, x), tokens(convolution, x)) < 1e-6
    assert graphs.frame_count == 1


class Doubled(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


def with_hook():
    convolution = nn.Conv2d(3, 5, 2, stride=2)
    convolution.register_forward_hook(lambda *_: None)
    return convolution


OTHERS = {
    "patches that overlap": lambda: nn.Conv2d(3, 5, 2, stride=1),
    "padding": lambda: nn.Conv2d(3, 5, 2, stride=2, padding=1),
    "padding by name": lambda: nn.Conv2d(3, 5, 1, padding="same"),
    "dilation": lambda: nn.Conv2d(3, 5, 2, stride=2, dilation=2),
    "groups": lambda: nn.Conv2d(3, 6, 2, stride=2, groups=3),
    "rows left over": lambda: nn.Conv2d(3, 5, 3, stride=3),
    "a subclass": lambda: Doubled(3, 5, 2, stride=2),
    "a hook": with_hook,
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_other_convolutions_are_called(make):
    convolution, x = make(), torch.randn(2, 3, 4, 6)
    assert not is_product(convolution, x)
    assert torch.equal(patch_tokens(convolution, x), tokens(convolution, x))


def test_a_forward_that_the_class_gets_later_is_called(monkeypatch):
    convolution, x = nn.Conv2d(3, 5, 2, stride=2), torch.randn(2, 3, 4, 6)
    monkeypatch.setattr(nn.Conv2d, "forward", lambda self, x: self._conv_forward(x, 2 * self.weight, self.bias))
    assert not is_product(convolution, x)


def test_under_torch_func_the_convolution_is_called():
    convolution, x = nn.Conv2d(3, 5, 2, stride=2), torch.randn(2, 3, 4, 6)
    assert not torch.func.grad(lambda x: x.sum() * is_product(convolution, x))(x).any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_on_a_gpu_patched_wan_calls_no_convolution_but_in_float32(dtype, monkeypatch):
    inputs = {name: value.cuda() for name, value in tiny_inputs("wan").items()}
    model, inputs["hidden_states"] = tiny_model("wan").cuda().to(dtype), inputs["hidden_states"].to(dtype)
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"].to(dtype)
    expected, gradients = output_and_gradients(model, inputs)
    patch_model(model)
    calls, original = [], nn.Conv3d._conv_forward
    monkeypatch.setattr(nn.Conv3d, "_conv_forward", lambda *args: calls.append(1) or original(*args))
    found, found_gradients = output_and_gradients(model, inputs)
    assert bool(calls) == (dtype == torch.float32)
    limit = 1e-5 if calls else 3e-2
    assert relative_error(found, expected) < limit
    for name in ("patch_embedding.weight", "patch_embedding.bias"):
        assert relative_error(found_gradients[name], gradients[name]) < limit
