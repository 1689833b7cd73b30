"""Guard 1: is a site rewritten only where the order of evaluation is provably the same?"""

import re

import pytest
import torch
from support.odd_blocks import ODD_BLOCKS, BranchCalledOnce
from support.odd_norms import ODD_NORMS

from adaptiveload_hf import UserError, patch_model


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, scale, shift, gate = (torch.randn(2, rows, 8, generator=generator) for rows in (5, 1, 1, 1))
    return [tensor.requires_grad_() for tensor in (x, scale, shift, gate)]


def run(block):
    """The output and the gradients of all inputs and parameters; the input is no leaf, so that it may be edited."""
    leaves = inputs()
    output = block(leaves[0] * 1, *leaves[1:])
    if output.requires_grad:
        (output * torch.linspace(-1, 1, output.numel()).reshape(output.shape)).sum().backward()
    gradients = [t.grad for t in (*leaves, *block.parameters()) if t.grad is not None]
    block.zero_grad()
    return [output.detach(), *gradients]


def patch_report(block):
    """(report of patching, or None; the words about what stayed eager)"""
    try:
        report = patch_model(block, verify="never")
    except UserError as error:
        return None, str(error)
    return report, str(report.to_dict()["classes"])


@pytest.mark.parametrize("block_class", [*ODD_BLOCKS, *ODD_NORMS], ids=lambda cls: cls.__name__)
def test_odd_blocks_compute_the_same_and_fuse_only_what_is_proven(block_class, op_calls):
    torch.manual_seed(0)
    block = block_class()
    expected = run(block)
    report, words = patch_report(block)

    found = run(block)

    assert len(found) == len(expected)
    for value, truth in zip(found, expected):
        torch.testing.assert_close(value, truth, rtol=1e-5, atol=1e-5)
    rows = report.to_dict()["classes"] if report else []
    assert sum(row["modulations_fused"] + row["gates_fused"] for row in rows) == block_class.fused
    assert block_class.reason in words
    assert bool(op_calls) == bool(block_class.fused)


def test_a_branch_with_effects_runs_exactly_once():
    block = BranchCalledOnce()
    patch_model(block, verify="never")
    run(block)
    assert block.calls == 1


def test_kept_tensors_are_let_go_after_their_use():
    block = next(cls for cls in ODD_BLOCKS if cls.__name__ == "HeldInLoop")()
    source = patch_model(block, verify="never").source("HeldInLoop")
    kept = set(re.findall(r"_adaln_[xny]\d+", source))
    assert len(kept) == 3
    for name in kept:
        assert f"{name} = None" in source
