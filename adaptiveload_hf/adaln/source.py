"""Is the source of a forward the code that runs? (Guard 2 of a rewrite.)"""

import __future__

import ast
import copy
import functools
import hashlib
import inspect
import linecache
import operator
import types
from collections.abc import Iterator
from dataclasses import dataclass

_FUTURE_FLAGS = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)
_CODE_FIELDS = (
    *("co_name", "co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_exceptiontable", "co_flags"),
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount"),
)
_EDITED = "its source file does not hold the code that runs (edited after import?)"


class LeftEager(Exception):
    """Why a forward, or one expression of it, is not rewritten. Shown in the report; never reaches the caller."""


@dataclass(frozen=True)
class FunctionSource:
    """A parsed function without annotations, defaults and decorators: those of the running function are kept.

    Args:
        tree: its definition, the caller's to change.
        class_name: the class whose body it stands in (private names are mangled with it), or None.
        digest: 16 hex digits of the SHA-256 of its text.
    """

    tree: ast.FunctionDef
    class_name: str | None
    digest: str

    def stored_name(self, name: str) -> str:
        """What a name of this source is called at run time: `self.__private` is stored as `_Class__private`."""
        private = name.startswith("__") and not name.endswith("__") and (self.class_name or "").strip("_")
        return f"_{self.class_name.lstrip('_')}{name}" if private else name

    def called_on_self(self) -> list[str]:
        """The distinct paths `a.b` that it calls as `self.a.b(...)`."""
        arguments = [*self.tree.args.posonlyargs, *self.tree.args.args]
        paths = {}
        for call in (node for node in ast.walk(self.tree) if isinstance(node, ast.Call)):
            root, _, path = ast.unparse(call.func).partition(".")
            if arguments and root == arguments[0].arg and all(part.isidentifier() for part in path.split(".")):
                paths[path] = None
        return list(paths)


def running_source(function: object) -> FunctionSource:
    """Parse the source of a forward and prove that it is the code that runs.

    The file is compiled as it is now; one of its functions must have the bytecode of this one.

    Args:
        function: what the class holds under the name `forward`.

    Raises:
        LeftEager: it is no plain function, is decorated, closes over variables (a `super()` without arguments does),
            has no source, or its source compiles to other bytecode than its own.
    """
    if hasattr(function, "__wrapped__"):
        raise LeftEager("its forward is decorated")
    candidates = list(_candidates(function))
    if function.__code__.co_freevars:
        raise LeftEager(f"its forward closes over {', '.join(function.__code__.co_freevars)}")
    for source, code in candidates:
        if _same_code(code, function.__code__):
            return source
    raise LeftEager(_EDITED)


def shown_source(function: object) -> FunctionSource:
    """Parse what the file says now, below any decorator, without any claim that it is what runs.

    Raises:
        LeftEager: it is no plain function, there is no source, or no such function stands there any more.
    """
    for source, _ in _candidates(undecorated(function)):
        return source
    raise LeftEager(_EDITED)


def undecorated(function: object) -> object:
    """The function below its decorators, as `functools.wraps` leads to it."""
    return inspect.unwrap(function) if inspect.isfunction(function) else function


def decorated_as(function: object, inner: types.FunctionType) -> types.FunctionType:
    """`inner` below the decorators of a function: their own wrappers, with another function in the closure.

    No decorator runs again.

    Raises:
        LeftEager: a wrapper does not hold the function that it wraps in a variable of its closure.
    """
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None:
        return inner
    cells = getattr(function, "__closure__", None) or ()
    if not any(_holds(cell, wrapped) for cell in cells):
        raise LeftEager("its forward is decorated by what does not hold it in a closure")
    inner = decorated_as(wrapped, inner)
    closure = tuple(types.CellType(inner) if _holds(cell, wrapped) else cell for cell in cells)
    code, names, defaults = function.__code__, function.__globals__, function.__defaults__
    wrapper = types.FunctionType(code, names, function.__name__, defaults, closure)
    wrapper.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(wrapper, inner)


def reparsed(tree: ast.FunctionDef) -> ast.FunctionDef:
    """An edited tree with the positions of its text, which order its expressions."""
    return ast.parse(ast.unparse(ast.fix_missing_locations(tree))).body[0]


def future_flags(function: types.FunctionType) -> int:
    """Compiler flags of the `from __future__ import ...` that a function was compiled under."""
    return function.__code__.co_flags & _FUTURE_FLAGS


def _candidates(function: object) -> Iterator[tuple[FunctionSource, types.CodeType]]:
    """The functions of that qualified name in the file of a function, parsed and compiled."""
    if not isinstance(function, types.FunctionType):
        raise LeftEager(f"its forward is a {type(function).__name__}, not a plain function")
    path = inspect.getsourcefile(function)
    if path is not None:
        linecache.checkcache(path)
    text = "".join(linecache.getlines(path, function.__globals__)) if path else ""
    if not text:
        raise LeftEager("its source is not available")
    try:
        tree, codes = _compiled(text)
    except SyntaxError as error:
        raise LeftEager(_EDITED) from error
    parts = function.__qualname__.split(".")
    class_name = parts[-2] if len(parts) > 1 and parts[-2] != "<locals>" else None
    wanted = [code for names, code in codes if ".".join(names) == function.__qualname__.replace(".<locals>", "")]
    for code in wanted:
        for node in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == code.co_name):
            first = node.decorator_list[0] if node.decorator_list else node
            if first.lineno == code.co_firstlineno:
                lines = text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno]
                digest = hashlib.sha256("".join(lines).encode()).hexdigest()[:16]
                yield FunctionSource(_without_signature(node), class_name, digest), code


def _holds(cell: types.CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # nothing yet
        return False


@functools.lru_cache(maxsize=8)
def _compiled(text: str) -> tuple[ast.Module, list[tuple[tuple[str, ...], types.CodeType]]]:
    """A file's tree and its code objects by their path of names.

    The whole file, since imports at its top change how calls of module functions compile.
    """
    tree = ast.parse(text)
    return tree, list(_inner_codes(compile(tree, "<unrewritten>", "exec", dont_inherit=True), ()))


def _inner_codes(code: types.CodeType, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], types.CodeType]]:
    for inner in (constant for constant in code.co_consts if isinstance(constant, types.CodeType)):
        path = (*names, inner.co_name)
        yield path, inner
        yield from _inner_codes(inner, path)


def _without_signature(node: ast.FunctionDef) -> ast.FunctionDef:
    tree = copy.deepcopy(node)
    arguments = tree.args
    for argument in (n for n in ast.walk(arguments) if isinstance(n, ast.arg)):
        argument.annotation = None
    tree.returns = None
    tree.decorator_list = []
    # Which arguments have a default must stay visible; the values come from the running function.
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    return ast.fix_missing_locations(tree)


def _same_code(one: types.CodeType, other: types.CodeType) -> bool:
    """Equal up to positions and file name."""
    return (
        all(getattr(one, name, None) == getattr(other, name, None) for name in _CODE_FIELDS)
        and len(one.co_consts) == len(other.co_consts)
        and all(map(_same_constant, one.co_consts, other.co_consts))
    )


def _same_constant(one: object, other: object) -> bool:
    if isinstance(one, types.CodeType) and isinstance(other, types.CodeType):
        return _same_code(one, other)
    if isinstance(one, frozenset) and isinstance(other, frozenset):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    return repr(one) == repr(other)  # 1, 1.0 and True are equal, but not the same constant
