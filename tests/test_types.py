"""Do type checkers see every public name, with its types? mypy itself runs in `make lint`."""

import ast
import inspect
from pathlib import Path

import pytest

import adaptiveload_hf
from adaptiveload_hf.buckets.plan import PlanOptions
from adaptiveload_hf.preflight import preflight

NAMES = [name for name in adaptiveload_hf.__all__ if name != "__version__"]
PUBLIC = [*(getattr(adaptiveload_hf, name) for name in NAMES), preflight]


def functions(value):
    """It, or the public functions, methods and properties that the class itself defines."""
    if not inspect.isclass(value):
        return [value]
    members = [member for name, member in vars(value).items() if name == "__init__" or not name.startswith("_")]
    found = [
        member.fget if isinstance(member, property) else getattr(member, "__func__", member) for member in members
    ]
    return [function for function in found if inspect.isfunction(function)]


@pytest.mark.parametrize("value", PUBLIC, ids=lambda value: value.__name__)
def test_every_public_function_says_the_types_of_its_arguments_and_result(value):
    for function in functions(value):
        signature = inspect.signature(function)
        first = 1 if "." in function.__qualname__ else 0
        untyped = [p.name for p in list(signature.parameters.values())[first:] if p.annotation is p.empty]
        if function.__name__ != "__init__" and signature.return_annotation is signature.empty:
            untyped.append("result")
        assert untyped == [], function.__qualname__


def test_the_names_for_type_checkers_are_those_that_can_be_imported():
    tree = ast.parse(Path(adaptiveload_hf.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    assert [alias.name for node in block.body for alias in node.names if alias.asname != alias.name] == []
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == adaptiveload_hf._PUBLIC


def test_a_loader_passes_on_whatever_a_configs_plan_takes_beside_data_ranks_and_dealing():
    taken = inspect.signature(adaptiveload_hf.BucketConfig.plan).parameters.keys()
    own = {"self", "shape_counts", "world_size", "gradient_accumulation_steps", "balance"}
    assert PlanOptions.__annotations__.keys() == taken - own
