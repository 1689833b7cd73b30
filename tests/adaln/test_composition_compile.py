"""Do patched models compile as unpatched ones do: whole or block by block, without a break, no more often?"""

import functools
from collections import Counter

import pytest
import torch
from support.compositions import (
    BOTH,
    ORDERS,
    cells_of,
    composed,
    fused_ops,
    largest_error,
    plain_name,
    plain_ops,
    same_refusal,
)
from support.tiny_models import output_and_gradients, relative_error, tiny_inputs
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def step(model, inputs):
    output, gradients = output_and_gradients(model, inputs)
    return output, {plain_name(name): gradient for name, gradient in gradients.items()}


def ops_in(graph):
    """How often each fused op stands in a graph."""
    names = (str(node.target) for node in graph.graph.nodes)
    return Counter(name.split(".")[1] for name in names if name.startswith("adaptiveload."))


def without_equal_blocks(model):
    """Fewer blocks to compile: the first, and the last where it is another kind."""
    blocks = model.blocks if hasattr(model, "blocks") else model.transformer_blocks
    del blocks[1 : len(blocks) - hasattr(model, "transformer_blocks")]


@BOTH
@ORDERS
def test_a_whole_model_is_one_graph_with_all_ops_and_right_gradients(family, patch_first, record):
    counter = CompileCounterWithBackend("aot_eager")

    def compose(model):
        without_equal_blocks(model)
        return torch.compile(model, fullgraph=True, backend=counter)

    inputs = tiny_inputs(family)
    output, gradients = step(composed(family, without_equal_blocks, None), inputs)
    _, by_itself = fused_ops(composed(family, without_equal_blocks, True), **inputs)
    compiled_output, compiled_gradients = step(composed(family, compose, patch_first), inputs)
    assert counter.frame_count == 1
    assert relative_error(compiled_output, output) < 1e-5
    assert largest_error(compiled_gradients, gradients) < 1e-5
    cells = cells_of(family, patch_first, ops_in(counter.graphs[0]), by_itself)
    record("torch.compile of the model, full graph", cells)


def larger(inputs):
    """Latents twice as wide: another S."""
    hidden = inputs["hidden_states"]
    return {**inputs, "hidden_states": torch.cat([hidden, hidden], dim=-1)}


def graphs_after_each_shape(family, compose, patch_first, batches=(1, 2)):
    """(the graphs, how many there were after each of a few batches and sizes) of blocks that are compiled alone."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    model, counts = composed(family, lambda model: compose(model, counter), patch_first), []
    for inputs in (*(tiny_inputs(family, batch=batch) for batch in batches), larger(tiny_inputs(family, batch=3))):
        model(**inputs)
        counts.append(counter.frame_count)
    return counter.graphs, counts


def compile_blocks(model, counter):
    model.compile_repeated_blocks(fullgraph=True, backend=counter)


@functools.cache
def unpatched_counts(family):
    return graphs_after_each_shape(family, compile_blocks, None)[1]


@BOTH
@ORDERS
def test_compiled_blocks_compile_no_more_often_than_unpatched_ones_at_any_shape(family, patch_first, record):
    if family == "sd35":
        cells = same_refusal(family, patch_first, lambda order: graphs_after_each_shape(family, compile_blocks, order))
    else:
        unpatched = unpatched_counts(family)
        graphs, counts = graphs_after_each_shape(family, compile_blocks, patch_first)
        assert all(ours <= theirs for ours, theirs in zip(counts, unpatched)), (counts, unpatched)
        found, plain = Counter(set(ops_in(graphs[0]))), Counter(set(plain_ops(family)))
        cells = cells_of(family, patch_first, found, plain)
    record("compile_repeated_blocks", cells)


def test_an_sd35_block_compiles_no_more_often_than_an_unpatched_one():
    def compose(model, counter):
        del model.transformer_blocks[1:]
        model.transformer_blocks[0].compile(fullgraph=True, backend=counter)

    _, unpatched = graphs_after_each_shape("sd35", compose, None, batches=[2])
    graphs, counts = graphs_after_each_shape("sd35", compose, False, batches=[2])
    assert all(ours <= theirs for ours, theirs in zip(counts, unpatched)), (counts, unpatched)
    assert all(ops_in(graph) for graph in graphs)


def test_compiled_blocks_under_gradient_checkpointing_give_the_same_gradients():
    def compose(model):
        model.enable_gradient_checkpointing(lambda f, *args: checkpoint(f, *args, use_reentrant=False))
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")

    inputs = tiny_inputs("wan")
    output, gradients = step(composed("wan", lambda model: None, None), inputs)
    compiled_output, compiled_gradients = step(composed("wan", compose, True), inputs)
    assert relative_error(compiled_output, output) < 1e-5
    assert largest_error(compiled_gradients, gradients) < 1e-5
