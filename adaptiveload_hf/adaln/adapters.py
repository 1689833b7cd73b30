"""How is a forward brought into the form that the rewriter knows, where its authors wrote another?

An adapter is a list of edits: statements of the forward, and statements that compute the same in the form
`norm(x) * (1 + scale) + shift` or `x + gate * y`. It names the sources that it was written for by their digests. After
a change of any of them the class is rewritten as it then stands, without the edits.
"""

import ast
import dataclasses
import hashlib
import textwrap
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from ..errors import UserError
from .source import FunctionSource, LeftEager, reparsed, running_source, undecorated

_ADAPTERS: dict[str, list["Adapter"]] = {}


@dataclasses.dataclass(frozen=True)
class Adapter:
    """What `register_adapter` was given, hashable and picklable."""

    class_name: str
    sources: tuple[tuple[str, str], ...]
    edits: tuple[tuple[str, str], ...]
    functions: tuple[Callable, ...]


def register_adapter(
    class_name: str,
    *,
    sources: Mapping[str, str],
    edits: Sequence[tuple[str, str]],
    functions: Sequence[Callable] = (),
) -> None:
    """Tell `patch_model` how a block's forward reads in the form that it recognises.

    Args:
        class_name: the block's class, with its module.
        sources: `source_digest` of "forward" and of each method or global function whose calls the edits take out, by
            name. Only a class with exactly these sources is edited. Register again for another version.
        edits: (statements of the forward, statements that stand for them and give the same values).
        functions: what the new statements call, by their own names. Module-level functions, so that a patched model
            pickles.

    Raises:
        UserError: `sources` has no forward, or an edit is no Python.
    """
    if "forward" not in sources:
        raise UserError(f"sources must hold the digest of forward, but it holds {', '.join(sources) or 'nothing'}.")
    for text in (text for edit in edits for text in edit):
        try:
            _statements(text)
        except SyntaxError as error:
            raise UserError(
                f"an edit for {class_name} must be Python statements, but {text!r} is not: {error}."
            ) from error
    adapter = Adapter(class_name, tuple(sources.items()), tuple(map(tuple, edits)), tuple(functions))
    _ADAPTERS.setdefault(class_name, []).append(adapter)


def source_digest(function: Callable) -> str:
    """The digest by which `register_adapter` recognises a function's source.

    Raises:
        UserError: the source is not the code that runs, or not available.
    """
    try:
        return running_source(function).digest
    except LeftEager as error:
        raise UserError(f"expected a plain function with its source: {error}.") from error


def adapter_of(module: nn.Module, owner: type) -> tuple[Adapter | None, str | None]:
    """The adapter for a module that runs the forward of `owner`, or why none of those registered is."""
    registered = _ADAPTERS.get(f"{owner.__module__}.{owner.__qualname__}", ())
    for adapter in registered:
        if all(_digest(module, owner, name) == digest for name, digest in adapter.sources):
            return adapter, None
    return None, "its adapter is for another version of its source" if registered else None


def helpers_of(owner: type, adapter: Adapter | None) -> tuple[tuple[str, object, bool], ...]:
    """(name, function, whether it is the class's) of each helper whose calls the edits of an adapter take out."""
    names = [name for name, _ in adapter.sources if name != "forward"] if adapter is not None else []
    return tuple((name, _helper(owner, name), hasattr(owner, name)) for name in names)


def adapted(source: FunctionSource, adapter: Adapter) -> FunctionSource:
    """A source with the edits of an adapter; its digest is of both.

    Raises:
        UserError: the statements of an edit do not stand in it exactly once.
    """
    for old, new in adapter.edits:
        places = list(_places(source.tree, _statements(old)))
        if len(places) != 1:
            raise UserError(
                f"the statements of an edit must stand once in the forward of {adapter.class_name}, but these stand "
                f"{len(places)} times: {old!r}."
            )
        block, begin, end = places[0]
        block[begin:end] = _statements(new)
    # Tests of a source say nothing about its edits.
    digest = hashlib.sha256(f"{source.digest} {adapter.edits}".encode()).hexdigest()[:16]
    return dataclasses.replace(source, tree=reparsed(source.tree), digest=digest)


def _statements(text: str) -> list[ast.stmt]:
    return ast.parse(textwrap.dedent(text)).body


def _places(tree: ast.AST, wanted: list[ast.stmt]):
    """(list of statements, begin, end) of each place where the wanted ones stand."""
    texts = list(map(ast.unparse, wanted))
    for node in ast.walk(tree):
        for block in (b for b in vars(node).values() if isinstance(b, list) and b and isinstance(b[0], ast.stmt)):
            for begin in range(len(block) - len(texts) + 1):
                if list(map(ast.unparse, block[begin : begin + len(texts)])) == texts:
                    yield block, begin, begin + len(texts)


def _helper(owner: type, name: str) -> object | None:
    """A function of a class, or else a global of its forward."""
    forward_globals = getattr(undecorated(vars(owner)["forward"]), "__globals__", {})
    return getattr(owner, name, forward_globals.get(name))


def _digest(module: nn.Module, owner: type, name: str) -> str | None:
    """Of such a function, as a module has it; None if the module has another."""
    function = _helper(owner, name)
    is_method = name != "forward" and hasattr(owner, name)
    if is_method and (getattr(type(module), name) is not function or name in vars(module)):
        return None
    try:
        return running_source(undecorated(function) if name == "forward" else function).digest
    except LeftEager:
        return None
