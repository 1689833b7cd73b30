"""Which helper functions modulate a norm's result, so that a forward reads as if they stood in it?

    def modulate(x, shift, scale): return x * (1 + scale) + shift        # DiT's own code, and what came of it
    y = modulate(self.norm(x), shift, scale)      reads      y = self.norm(x) * (1 + scale) + shift

Only a function that returns one expression of its arguments is read so, and only where evaluating these in the order
of that expression changes nothing.
"""

import ast
import dataclasses
import hashlib
import types
from collections.abc import Callable

from .source import FunctionSource, LeftEager, reparsed, running_source

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# What may be evaluated earlier or later, and what a helper may do with it.
_PLACES = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Slice, ast.Tuple, ast.expr_context)
_ARITHMETIC = (*_PLACES, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop, ast.Call, ast.keyword)


def with_helpers(
    source: FunctionSource, function_globals: dict, is_norm: Callable[[str], bool]
) -> tuple[FunctionSource, tuple[tuple[str, types.FunctionType], ...]]:
    """A source in which helpers that are given a norm's result are read as what they return, and these helpers.

    Args:
        source: of a forward.
        function_globals: its globals, where it finds the helpers.
        is_norm: whether `self.<path>` is a norm that an op stands for.

    Returns:
        the source, its digest of the helpers too; (name, function) of each helper.
    """
    reader = _Reader(source.tree, function_globals, is_norm)
    tree = reader.visit(source.tree)
    if not reader.found:
        return source, ()
    digests = [helper.digest for helper, _ in reader.found.values()]
    digest = hashlib.sha256(f"{source.digest} {digests}".encode()).hexdigest()[:16]
    helpers = tuple((name, function) for name, (_, function) in reader.found.items())
    return dataclasses.replace(source, tree=reparsed(tree), digest=digest), helpers


class _Reader(ast.NodeTransformer):
    """Puts what helpers return in the place of their calls; `found` then has (source, function) of each by name."""

    def __init__(self, tree: ast.FunctionDef, function_globals: dict, is_norm: Callable[[str], bool]):
        nodes = list(ast.walk(tree))
        self.found: dict[str, tuple[FunctionSource, types.FunctionType]] = {}
        self._globals = function_globals
        self._self = (tree.args.posonlyargs + tree.args.args)[0].arg if tree.args.posonlyargs + tree.args.args else ""
        self._is_norm = is_norm
        self._local = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        self._local |= {n.arg for n in nodes if isinstance(n, ast.arg)}
        self._local |= {n.name for n in nodes if isinstance(n, _SCOPES) and n is not tree}
        self._local |= {(n.asname or n.name).partition(".")[0] for n in nodes if isinstance(n, ast.alias)}
        self._normed = {
            target.id
            for n in nodes
            if isinstance(n, ast.Assign) and self._is_norm_call(n.value)
            for target in n.targets
            if isinstance(target, ast.Name)
        }

    def visit_Call(self, call: ast.Call) -> ast.expr:
        self.generic_visit(call)
        name = call.func.id if isinstance(call.func, ast.Name) else None
        function = None if name in self._local else self._globals.get(name)
        if not isinstance(function, types.FunctionType) or not self._is_given_norm(call):
            return call
        try:
            helper = running_source(function)
        except LeftEager:
            return call
        expression, arguments = _returned(helper.tree), _matched(helper.tree, call)
        if expression is None or arguments is None or not self._may_replace(expression, arguments):
            return call
        self.found[name] = helper, function
        return _Substituted(arguments).visit(expression)

    def _is_norm_call(self, node: ast.expr) -> bool:
        if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
            return False
        root, _, path = ast.unparse(node.func).partition(".")
        return root == self._self and self._is_norm(path)

    def _is_given_norm(self, call: ast.Call) -> bool:
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        return any(self._is_norm_call(value) or getattr(value, "id", None) in self._normed for value in values)

    def _may_replace(self, expression: ast.expr, arguments: dict[str, ast.expr]) -> bool:
        """Whether a norm that is called among the arguments is still called once, and before all else."""
        called = [parameter for parameter, value in arguments.items() if self._is_norm_call(value)]
        others = [value for parameter, value in arguments.items() if parameter not in called]
        if not all(isinstance(node, _PLACES) for value in others for node in ast.walk(value)):
            return False
        read = [node.id for node in ast.walk(expression) if isinstance(node, ast.Name)]
        if set(read) != arguments.keys():
            return False
        return not called or (called == [_first(expression)] and read.count(called[0]) == 1)


def _returned(tree: ast.FunctionDef) -> ast.expr | None:
    """What a function returns, if that is all it does, and only arithmetic of its arguments and their methods."""
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    expression = body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None
    if expression is None or tree.args.vararg or tree.args.kwarg:
        return None
    for node in ast.walk(expression):
        calls_function = isinstance(node, ast.Call) and not isinstance(node.func, ast.Attribute)
        private = isinstance(node, ast.Attribute) and node.attr.startswith("__")  # is called otherwise within a class
        if calls_function or private or not isinstance(node, _ARITHMETIC):
            return None
    return expression


def _matched(tree: ast.FunctionDef, call: ast.Call) -> dict[str, ast.expr] | None:
    """The argument of each parameter, if a call gives every one of them."""
    positional = [argument.arg for argument in (*tree.args.posonlyargs, *tree.args.args)]
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    if starred or len(call.args) > len(positional):
        return None
    given = [*zip(positional, call.args), *((keyword.arg, keyword.value) for keyword in call.keywords)]
    parameters = {*positional, *(argument.arg for argument in tree.args.kwonlyargs)}
    arguments = dict(given)
    return arguments if len(given) == len(arguments) and arguments.keys() == parameters else None


def _first(node: ast.AST) -> str | None:
    """The variable that an expression reads first, if it computes nothing before."""
    while node is not None and not isinstance(node, ast.Name):
        node = next((child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)), None)
    return getattr(node, "id", None)


class _Substituted(ast.NodeTransformer):
    def __init__(self, arguments: dict[str, ast.expr]):
        self._arguments = arguments

    def visit_Name(self, name: ast.Name) -> ast.expr:
        return self._arguments[name.id]
