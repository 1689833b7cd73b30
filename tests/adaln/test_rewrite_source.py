"""Guard 2: is a forward rewritten only if its source is the code that runs?"""

import functools
import importlib.util
import pickle
import sys
import textwrap
import types
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from support.compositions import fused_ops
from support.odd_blocks import ODD_BLOCKS
from torch import nn

from adaptiveload_hf import UserError, patch_model, unpatch_model

SOURCE = """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8, elementwise_affine=False)

        def forward(self, x, scale, shift, bonus=1 + 1):
            '''A long string

    that no dedenting may change.'''
            return self.norm(x) * (1 + scale) + shift + bonus
    """


def tensors():
    torch.manual_seed(0)
    return torch.randn(2, 5, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 8)


@pytest.fixture
def module_of(tmp_path):
    """Writes a module, imports it, and forgets it afterwards."""
    names = []

    def load(text, name="written_block"):
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(text))
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        names.append(name)
        spec.loader.exec_module(module)
        return module, path

    yield load
    for name in names:
        del sys.modules[name]


def test_a_block_from_a_file_is_rewritten_with_its_own_defaults(module_of):
    block = module_of(SOURCE)[0].Block()
    expected = block(*tensors())
    assert "1/1" in str(patch_model(block, verify="never"))
    torch.testing.assert_close(block(*tensors()), expected)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("+ bonus", "- bonus"),
        ("self.norm(x)", "self.norm(2 * x)"),
        ("def forward", "def forwards"),
        ("(1 + scale)", "(1.0 + scale)"),
        ("import torch", "import ("),
    ],
)
def test_a_file_edited_after_import_is_refused(module_of, old, new):
    module, path = module_of(SOURCE)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError, match="edited after import"):
        patch_model(module.Block())


def test_a_file_whose_other_lines_moved_is_still_rewritten(module_of):
    module, path = module_of(SOURCE)
    block = module.Block()
    expected = block(*tensors())
    path.write_text("# one line\n# and another\n" + path.read_text() + "\nclass Other:\n    pass\n")
    patch_model(block, verify="never")
    torch.testing.assert_close(block(*tensors()), expected)


def test_a_class_without_source_is_refused():
    namespace = {"__name__": "nowhere"}
    exec(textwrap.dedent(SOURCE), namespace)
    with pytest.raises(UserError, match="its source is not available"):
        patch_model(namespace["Block"]())


def test_future_imports_of_the_module_hold_in_the_new_code(module_of):
    text = "from __future__ import annotations\n" + textwrap.dedent(SOURCE).replace(
        "scale, shift", "scale: Gone, shift"
    )
    block = module_of(text)[0].Block()
    expected = block(*tensors())
    patch_model(block, verify="never")
    torch.testing.assert_close(block(*tensors()), expected)


DECORATED = """
import functools
decorated = []

def times(factor):
    def decorator(function):
        decorated.append(function)
        @functools.wraps(function)
        def wrapper(self, *args, last=1, **kwargs):
            return function(self, *args, **kwargs) * factor * last
        return wrapper
    return decorator

def from_a_table(function):
    table = [function]
    @functools.wraps(function)
    def wrapper(*args):
        return table[0](*args)
    return wrapper
"""


def decorated(decorators):
    return DECORATED + textwrap.dedent(SOURCE).replace("    def forward", f"    {decorators}\n    def forward")


def test_a_decorated_forward_keeps_its_decorators_which_do_not_run_again(module_of):
    module, _ = module_of(decorated("@torch.no_grad()\n    @times(3)"))
    block, (x, scale, shift) = module.Block(), tensors()
    expected = block(x.requires_grad_(), scale, shift, last=7)
    report = patch_model(block, verify="never")
    found, ops = fused_ops(block, x, scale, shift, last=7)
    torch.testing.assert_close(found, expected)
    assert not found.requires_grad and sum(ops.values()) == 1
    assert len(module.decorated) == 1
    assert "_adaln.modulate" in report.source("Block")
    unpatch_model(block)
    assert torch.equal(block(x, scale, shift, last=7), expected)


def test_a_decorator_that_keeps_its_function_elsewhere_is_left_and_named(module_of):
    with pytest.raises(UserError, match="its forward is decorated by what does not hold it in a closure"):
        patch_model(module_of(decorated("@from_a_table"))[0].Block())


def test_a_class_attribute_that_is_no_function_is_named():
    class Callable(nn.Module):
        forward = staticmethod(lambda x: x)

    with pytest.raises(UserError, match="its forward is a staticmethod, not a plain function"):
        patch_model(Callable())


def test_an_instance_with_a_foreign_forward_is_left_and_named(module_of):
    block = module_of(SOURCE)[0].Block()

    def their_forward(x, scale, shift):
        return x

    block.forward = their_forward
    with pytest.raises(UserError, match=r"not the class's own but .*their_forward"):
        patch_model(block)
    assert block.forward is their_forward


def test_a_foreign_forward_around_ours_is_left_and_not_taken_for_ours(module_of):
    block = module_of(SOURCE)[0].Block()
    patch_model(block, verify="never")

    @functools.wraps(block.forward)
    def their_forward(self, *args):
        return torch.zeros(())

    block.forward = types.MethodType(their_forward, block)
    unpatch_model(block)
    assert block(*tensors()) == 0
    with pytest.raises(UserError, match="not the class's own"):
        patch_model(block)


def test_other_bound_methods_pickle_as_before():
    assert pickle.loads(pickle.dumps(textwrap.TextWrapper(width=7).fill))("a b") == "a b"


def test_a_replaced_class_forward_is_read_anew(module_of):
    module, _ = module_of(SOURCE)
    other, _ = module_of(SOURCE.replace("+ bonus", "- bonus"), name="other_block")
    block = module.Block()
    patch_model(block, verify="never")
    unpatch_model(block)
    module.Block.forward = other.Block.forward
    expected = block(*tensors())
    patch_model(block, verify="never")
    torch.testing.assert_close(block(*tensors()), expected)


def test_tracebacks_show_the_generated_code(module_of):
    block = module_of(SOURCE)[0].Block()
    report = patch_model(block, verify="never")
    with pytest.raises(TypeError) as caught:
        block(*tensors(), bonus="no number")
    shown = str(caught.traceback[-1].statement)
    assert "_adaln.modulate" in shown
    assert shown.strip() in report.source("Block")


def test_a_patched_block_pickles_as_its_class_and_is_rewritten_where_it_is_loaded():
    block = next(cls for cls in ODD_BLOCKS if cls.__name__ == "HeldInLoop")()
    patch_model(block, verify="never")
    loaded = pickle.loads(pickle.dumps(block))
    x, scale, shift = tensors()
    assert torch.equal(loaded(x, scale, shift, scale), block(x, scale, shift, scale))
    with torch.no_grad():
        loaded.linear.weight.zero_()
    assert not torch.equal(loaded(x, scale, shift, scale), block(x, scale, shift, scale))


def held_in_loop():
    block = next(cls for cls in ODD_BLOCKS if cls.__name__ == "HeldInLoop")()
    patch_model(block, verify="never")
    return block


def test_what_multiprocessing_sends_to_another_process_is_patched():
    loaded = pickle.loads(ForkingPickler.dumps(held_in_loop()))
    assert loaded.forward.__func__.rewritten.function is not type(loaded).forward
    unpatch_model(loaded)
    assert "forward" not in vars(loaded)


def test_a_patch_is_known_where_its_function_was_copied_by_value():
    """As cloudpickle and dill copy functions."""
    block = held_in_loop()
    function = block.forward.__func__
    copied = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, function.__closure__)
    vars(copied).update(vars(function))
    block.forward = types.MethodType(copied, block)
    assert patch_model(block, verify="never").instances_patched
    unpatch_model(block)
    assert "forward" not in vars(block)
