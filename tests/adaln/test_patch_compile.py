"""How do patched modules meet torch.compile? Whole models: test_composition_compile.py."""

import pytest
import torch
from diffusers.models.normalization import AdaLayerNormZero
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

from adaptiveload_hf import patch_model

OPS = {"adaptiveload.layer_norm_modulate.default", "adaptiveload.gate_residual.default"}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def targets(graph_module):
    return {str(node.target) for node in graph_module.graph.nodes}


class BlockWithPatchedChild(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = AdaLayerNormZero(8)

    def forward(self, x, emb):
        y, gate, *_ = self.norm1(x, emb=emb)
        return x + gate.unsqueeze(1) * y


def graphs_of_four_blocks(patch):
    """How many graphs it takes to compile each of four blocks on its own and run them at three batch sizes."""
    torch._dynamo.reset()
    blocks = torch.nn.Sequential(*(BlockWithPatchedChild() for _ in range(4)))
    if patch:
        patch_model(blocks)
    counter = CompileCounter()
    for block in blocks:
        block.compile(fullgraph=True, backend=counter)
    for batch in (1, 2, 3):
        for block in blocks:
            block(torch.randn(batch, 5, 8), torch.randn(batch, 8))
    return counter.frame_count


def test_compiled_blocks_share_one_graph_although_their_children_are_patched():
    unpatched, patched = (graphs_of_four_blocks(patch) for patch in (False, True))
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
