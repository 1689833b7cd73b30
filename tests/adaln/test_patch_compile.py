"""Do patched models compile: one graph, the fused ops in it, no more compilations than unpatched ones?"""

import pytest
import torch
from diffusers.models.normalization import AdaLayerNormZero
from support.tiny_models import output_and_gradients, relative_error, tiny_inputs, tiny_model
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

from adaptiveload_hf import patch_model

OPS = {"adaptiveload.layer_norm_modulate.default", "adaptiveload.gate_residual.default"}
OTHERS = {"adaptiveload.gate_residual_layer_norm_modulate.default", "adaptiveload.rms_norm_rope.default"}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def targets(graph_module):
    return {str(node.target) for node in graph_module.graph.nodes}


def test_a_whole_model_is_one_graph_and_its_gradients_are_right():
    model, inputs = tiny_model("wan"), tiny_inputs("wan")
    output, gradients = output_and_gradients(model, inputs)
    patch_model(model)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    compiled_output, compiled_gradients = output_and_gradients(compiled, inputs)
    assert counter.frame_count == 1
    assert targets(counter.graphs[0]) >= OPS | OTHERS
    assert relative_error(compiled_output, output) < 1e-5
    for name, gradient in gradients.items():
        assert relative_error(compiled_gradients["_orig_mod." + name], gradient) < 1e-5, name


def frames_of_compiled_blocks(make_blocks, run, patch):
    """How many graphs it takes to compile each block on its own and run them at three batch sizes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, blocks = make_blocks()
    if patch:
        patch_model(model)
    counter = CompileCounter()
    for block in blocks:
        block.compile(fullgraph=True, backend=counter)
    for batch in (1, 2, 3):
        run(model, batch)
    return counter.frame_count


def test_compiled_blocks_recompile_no_more_often_than_unpatched_ones():
    def make_blocks():
        model = tiny_model("wan")
        return model, model.blocks

    def run(model, batch):
        model(**tiny_inputs("wan", batch=batch))

    unpatched, patched = (frames_of_compiled_blocks(make_blocks, run, patch) for patch in (False, True))
    assert patched <= unpatched


class BlockWithPatchedChild(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = AdaLayerNormZero(8)

    def forward(self, x, emb):
        y, gate, *_ = self.norm1(x, emb=emb)
        return x + gate.unsqueeze(1) * y


def test_compiled_blocks_share_one_graph_although_their_children_are_patched():
    def make_blocks():
        blocks = torch.nn.Sequential(*(BlockWithPatchedChild() for _ in range(4)))
        return blocks, blocks

    def run(blocks, batch):
        for block in blocks:
            block(torch.randn(batch, 5, 8), torch.randn(batch, 8))

    unpatched, patched = (frames_of_compiled_blocks(make_blocks, run, patch) for patch in (False, True))
    assert patched <= unpatched <= 2


def norm_and_input():
    torch.manual_seed(0)
    return AdaLayerNormZero(8), (torch.randn(2, 5, 8), None, None, torch.float32, torch.randn(2, 8))


def test_patched_after_a_compiled_run_it_is_compiled_anew():
    norm, inputs = norm_and_input()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(norm, fullgraph=True, backend=counter)
    expected = compiled(*inputs)[0]
    patch_model(compiled)
    torch.testing.assert_close(compiled(*inputs)[0], expected)
    assert counter.frame_count == 2
    assert targets(counter.graphs[1]) & OPS


def test_an_uncompared_class_compiles_as_its_original_until_an_eager_call_was_compared():
    norm, inputs = norm_and_input()
    expected = norm(*inputs)[0]
    report = patch_model(norm, verify="always")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(norm, fullgraph=True, backend=counter)
    assert torch.equal(compiled(*inputs)[0], expected)
    assert "not compared yet" in str(report)
    norm(*inputs)
    assert "first call was equal" in str(report)
    torch.testing.assert_close(compiled(*inputs)[0], expected)
    assert [bool(targets(graph) & OPS) for graph in counter.graphs] == [False, True]
