"""Does an adapter bring a forward into the form that is recognised, and only the sources that it was written for?"""

import importlib.util
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch
from diffusers.models.normalization import AdaLayerNormZeroSingle
from support import helper_blocks
from support.helper_blocks import GlobalHelperBlock, HelperBlock, OtherHelper, inputs
from support.model_configs import tiny_case
from support.model_runs import cast_inputs, run
from torch.utils._python_dispatch import TorchDispatchMode

from adaptiveload_hf import UserError, patch_model, register_adapter, source_digest, unpatch_model
from adaptiveload_hf.adaln import adapters

DOCS = Path(__file__).parents[2] / "docs" / "patching.md"
NAME = "support.helper_blocks.HelperBlock"
SOURCES = {"forward": source_digest(HelperBlock.forward), "modulate": source_digest(HelperBlock.modulate)}
EDIT = (
    "normed, gate = self.modulate(self.norm(x), self.modulation(temb))",
    "shift, scale, gate = rows(self.modulation(temb))\nnormed = self.norm(x) * (1 + scale) + shift",
)


def other_rows(modulation):
    return helper_blocks.rows(modulation)


@pytest.fixture(autouse=True)
def own_adapters(monkeypatch):
    monkeypatch.setattr(adapters, "_ADAPTERS", {name: list(found) for name, found in adapters._ADAPTERS.items()})


def counts(report):
    row = report.to_dict()["classes"][0]
    return row["modulations_fused"], row["gates_fused"]


def check_equal(block):
    expected = type(block).forward(block, *inputs())
    torch.testing.assert_close(block(*inputs()), expected)


def test_an_edited_forward_is_fused_and_gives_the_same():
    block = HelperBlock()
    assert counts(patch_model(block)) == (0, 1)
    register_adapter(NAME, sources=SOURCES, edits=[EDIT])
    assert counts(patch_model(block, verify="never")) == (1, 1)
    check_equal(block)
    unpatch_model(block)
    assert "forward" not in vars(block)


def test_a_wrong_edit_is_found_by_the_first_call():
    register_adapter(NAME, sources=SOURCES, edits=[(EDIT[0], EDIT[1].replace("1 + scale", "1 + shift"))])
    block = HelperBlock()
    patch_model(block)
    with pytest.warns(UserWarning, match="HelperBlock differs from the original, which runs instead"):
        check_equal(block)


def test_an_edit_of_a_source_that_the_tests_cover_is_compared_too():
    norm = AdaLayerNormZeroSingle(8)
    name = f"{AdaLayerNormZeroSingle.__module__}.AdaLayerNormZeroSingle"
    edit = ("emb = self.linear(self.silu(emb))", "emb = self.linear(self.silu(emb)) * 2")
    register_adapter(name, sources={"forward": source_digest(AdaLayerNormZeroSingle.forward)}, edits=[edit])
    assert "not compared yet" in str(patch_model(norm))
    with pytest.warns(UserWarning, match="differs from the original"):
        norm(torch.randn(2, 5, 8), torch.randn(2, 8))


def test_a_hook_on_the_norm_of_an_edited_forward_is_called():
    register_adapter(NAME, sources=SOURCES, edits=[EDIT])
    block = HelperBlock()
    patch_model(block, verify="never")
    seen = []
    block.norm.register_forward_hook(lambda *args: seen.append(1))
    check_equal(block)
    assert len(seen) == 2


def test_a_helper_of_a_subclass_is_called():
    register_adapter(NAME, sources=SOURCES, edits=[EDIT])
    block = OtherHelper()
    report = patch_model(block, verify="never")
    assert counts(report) == (0, 1)
    assert "its adapter is for another version of its source" in str(report)
    check_equal(block)


def test_a_helper_of_an_instance_is_called():
    register_adapter(NAME, sources=SOURCES, edits=[EDIT])
    block = HelperBlock()
    block.modulate = lambda x, modulation: (x * 0, 1)
    assert counts(patch_model(block, verify="never")) == (0, 1)
    check_equal(block)


def test_a_global_helper_is_part_of_the_version(monkeypatch):
    name = "support.helper_blocks.GlobalHelperBlock"
    sources = {
        "forward": source_digest(GlobalHelperBlock.forward),
        "modulated": source_digest(helper_blocks.modulated),
    }
    statement = "return x + gate * self.ff({})"
    new = statement.format("self.norm(x) * (1 + scale) + shift")
    register_adapter(name, sources=sources, edits=[(statement.format("modulated(self.norm(x), shift, scale)"), new)])
    block = GlobalHelperBlock()
    assert counts(patch_model(block, verify="never")) == (1, 1)
    check_equal(block)
    monkeypatch.setattr(helper_blocks, "modulated", helper_blocks.rows)
    assert counts(patch_model(block, verify="never")) == (0, 1)


def test_functions_of_an_adapter_are_called_and_the_block_pickles():
    new = EDIT[1].replace("rows", "other_rows")
    register_adapter(NAME, sources=SOURCES, edits=[(EDIT[0], new)], functions=[other_rows])
    block = HelperBlock()
    patch_model(block, verify="never")
    loaded = pickle.loads(pickle.dumps(block))
    assert torch.equal(loaded(*inputs()), block(*inputs()))


def test_another_version_leaves_the_rest_fused_and_says_so():
    register_adapter(NAME, sources={**SOURCES, "modulate": "0" * 16}, edits=[EDIT])
    report = patch_model(HelperBlock())
    assert counts(report) == (0, 1)
    assert "its adapter is for another version of its source" in str(report)
    register_adapter(NAME, sources=SOURCES, edits=[EDIT])
    assert counts(patch_model(HelperBlock())) == (1, 1)


def test_what_cannot_be_registered_is_said():
    with pytest.raises(UserError, match="sources must hold the digest of forward, but it holds modulate"):
        register_adapter(NAME, sources={"modulate": ""}, edits=[EDIT])
    with pytest.raises(UserError, match=r"an edit for .*HelperBlock must be Python statements, but 'x =' is not"):
        register_adapter(NAME, sources=SOURCES, edits=[("x =", "x = 1")])
    with pytest.raises(UserError, match=r"expected a plain function with its source: .*is a type"):
        source_digest(HelperBlock)


def test_an_edit_that_does_not_stand_once_is_said():
    register_adapter(NAME, sources=SOURCES, edits=[("gate = 1", "gate = 2")])
    with pytest.raises(UserError, match=r"must stand once in the forward of .*HelperBlock, but these stand 0 times"):
        patch_model(HelperBlock())


def test_an_error_leaves_nothing_patched():
    register_adapter(NAME, sources=SOURCES, edits=[("gate = 1", "gate = 2")])
    model = torch.nn.ModuleList([GlobalHelperBlock(), HelperBlock()])
    with pytest.raises(UserError, match="must stand once"):
        patch_model(model)
    assert "forward" not in vars(model[0])


def test_the_example_in_the_docs_runs(tmp_path, monkeypatch, capsys):
    text = DOCS.read_text().partition("## A family of your own")[2]
    path = tmp_path / "my_block.py"
    path.write_text(re.search(r"```python\n(.*?)```", text, re.S)[1])
    spec = importlib.util.spec_from_file_location("my_block", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "my_block", module)
    spec.loader.exec_module(module)
    assert re.search(r"Block +\| 1 +\| 1/1 +\| 1/1", capsys.readouterr().out)


class LargestFloat32(TorchDispatchMode):
    """The largest float32 tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, list | tuple) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.elements = max(self.elements, tensor.numel())
        return output


@pytest.mark.parametrize("name", ["Wan 2.2 TI2V", "SkyReels V2 DF", "AnyFlow"])
def test_modulation_of_each_token_is_never_held_in_float32(name):
    model, inputs = tiny_case(name)
    model, inputs = model.to(torch.bfloat16), cast_inputs(inputs, torch.bfloat16)
    found, saved = {}, {}
    for kind in ("eager", "patched"):
        if kind == "patched":
            patch_model(model)
        kept = {}

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with LargestFloat32() as mode, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            run(model, inputs)
        found[kind], saved[kind] = mode.elements, sum(kept.values())
    width = model.config.num_attention_heads * model.config.attention_head_dim
    frames, height, width_of_tokens = (2, 2, 2) if name != "Wan 2.2 TI2V" else (3, 2, 2)
    elements = 2 * frames * height * width_of_tokens * width
    assert found["eager"] >= 6 * elements
    assert found["patched"] < 6 * elements
    # 24 bytes of modulation for each element of the stream and block, and what is kept at modulations and gates
    assert saved["patched"] < saved["eager"] - 24 * elements * model.config.num_layers
