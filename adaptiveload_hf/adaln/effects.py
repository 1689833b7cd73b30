"""What does each statement of a forward read, store and change? (Guard 1 of a rewrite: moving code changes nothing.)

Conservative throughout: names are joined for the whole function, any call may change and may return what it is given.
"""

import ast
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from .source import LeftEager

# Tensor methods that change neither their tensor nor anything else.
_PURE_METHODS = {
    *("bfloat16", "chunk", "contiguous", "detach", "dim", "expand", "flatten", "float", "half", "index_select"),
    *("permute", "reshape"),
    *("sigmoid", "size", "split", "squeeze", "tanh", "to", "transpose", "type_as", "unbind", "unflatten", "unsqueeze"),
    "view",
}
_PURE_TORCH_FUNCTIONS = frozenset({"cat", "chunk", "sigmoid", "split", "stack", "tanh"})
_ATTRIBUTES_WITHOUT_TENSOR = frozenset({"shape", "ndim", "dtype", "device", "training"})
_METHODS_WITHOUT_TENSOR = frozenset({"size", "dim", "numel"})
_FRAME_READERS = frozenset({"locals", "vars", "eval", "exec"})
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_LATER = (*_SCOPES, ast.GeneratorExp)  # what they hold runs when they are called or consumed
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Pass, ast.Return)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


@dataclass(frozen=True)
class Place:
    """Where a statement stands: its list of siblings, the loops around it, whether a `try` or `with` is around it, and
    whether a decided `if` never lets it run."""

    block: list[ast.stmt]
    index: int
    loops: tuple[ast.stmt, ...]
    guarded: bool
    dead: bool


class Effects:
    """What the statements of one function do, from its tree alone.

    Args:
        function: the tree that is going to be rewritten.
        function_globals: the function's globals, to know whether `torch` is torch.
        decided: the value of each test of an `if` that is known beforehand, by its text.
    """

    def __init__(self, function: ast.FunctionDef, function_globals: dict, decided: Mapping[str, bool]):
        arguments = [*function.args.posonlyargs, *function.args.args]
        self.self_name = arguments[0].arg if arguments else ""
        self.statements: list[ast.stmt] = []
        self._places: dict[int, Place] = {}
        self._decided = decided
        self._index(function.body, (), False, False)
        self._nodes = [node for node in ast.walk(function) if node is not function]
        self._variables = [node for node in self._nodes if isinstance(node, ast.Name)]
        self._stored = {node.id for node in self._variables if _stores(node)}
        self._augmented = {id(node.target) for node in self._nodes if isinstance(node, ast.AugAssign)}
        self._in_scopes = {id(n) for scope in self._nodes if isinstance(scope, _LATER) for n in ast.walk(scope)}
        torch_module = function_globals.get("torch")
        shadowed = "torch" in self._stored | {node.arg for node in self._nodes if isinstance(node, ast.arg)}
        is_module = isinstance(torch_module, types.ModuleType) and torch_module.__name__ == "torch"
        self._torch_is_torch = is_module and not shadowed
        self._groups = _joined(self._flows())
        self._changes = list(self._all_changes())

    def check_followed(self) -> None:
        """Raise LeftEager if the function does what this analysis does not follow: yield, await, global, locals()."""
        for node in self._nodes:
            if isinstance(node, ast.Yield | ast.YieldFrom | ast.Await | ast.Global | ast.Nonlocal):
                raise LeftEager(f"its forward uses {type(node).__name__.lower()}")
        for name in (node.id for node in self._variables):
            if name in _FRAME_READERS:
                raise LeftEager(f"its forward uses {name}()")
        if not self.self_name or self.self_name in self._stored:
            raise LeftEager("its forward assigns to self")

    def _index(self, block: list[ast.stmt], loops: tuple[ast.stmt, ...], guarded: bool, dead: bool) -> None:
        for index, statement in enumerate(block):
            self._places[id(statement)] = Place(block, index, loops, guarded, dead)
            self.statements.append(statement)
            if isinstance(statement, _SCOPES):
                continue
            inner_loops = (*loops, statement) if isinstance(statement, _LOOPS) else loops
            can_swallow = isinstance(statement, ast.Try | ast.With | getattr(ast, "TryStar", ast.Try))
            taken = self._decided.get(ast.unparse(statement.test)) if isinstance(statement, ast.If) else None
            for inner in _blocks(statement):
                skipped = taken is not None and (inner is statement.body) is not taken
                self._index(inner, inner_loops, guarded or can_swallow, dead or skipped)

    def may_run(self, statement: ast.stmt) -> bool:
        """Whether no decided `if` keeps a statement from running."""
        return not self._places[id(statement)].dead

    def is_simple(self, statement: ast.stmt) -> bool:
        """Whether a statement belongs to a basic block as a whole."""
        return isinstance(statement, _SIMPLE)

    # ------------------------------------------------------------------------------------------ values

    def path(self, node: ast.expr) -> str | None:
        """`a.b` for `self.a.b`, None for anything else."""
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        is_self = isinstance(node, ast.Name) and node.id == self.self_name
        return ".".join(reversed(parts)) if parts and is_self else None

    def names(self, node: ast.AST | None) -> set[str]:
        """Variables (`self.x` being one) whose tensors the value of an expression may share."""
        if isinstance(node, ast.Name):
            return {node.id} - {self.self_name}
        if isinstance(node, ast.Attribute):
            if node.attr in _ATTRIBUTES_WITHOUT_TENSOR:
                return set()
            path = self.path(node)
            return {f"self.{path}"} if path else self.names(node.value)
        if isinstance(node, ast.Call):
            return set() if _method(node) in _METHODS_WITHOUT_TENSOR else self._reach(node)
        if node is None or isinstance(node, ast.Compare):
            return set()
        return set().union(*map(self.names, ast.iter_child_nodes(node)))

    def _reach(self, call: ast.Call) -> set[str]:
        """Variables that a call is given: its arguments, and its receiver unless that is a module of self."""
        reach = set().union(*map(self.names, _arguments(call)))
        if isinstance(call.func, ast.Attribute) and (not self.path(call.func) or _is_in_place(call)):
            reach |= self.names(call.func.value)
        return reach

    def pure(self, node: ast.AST | None) -> bool:
        """Whether an expression has no effect and depends on its `names` alone (attributes are taken as data)."""
        if isinstance(node, ast.Call):
            return self._pure_call(node) and all(map(self.pure, _arguments(node)))
        if isinstance(node, (ast.Lambda, ast.NamedExpr, *_COMPREHENSIONS)):
            return False
        return node is None or all(map(self.pure, ast.iter_child_nodes(node)))

    def _pure_call(self, call: ast.Call) -> bool:
        if not isinstance(call.func, ast.Attribute) or _is_in_place(call):
            return False
        receiver = call.func.value
        if isinstance(receiver, ast.Name) and receiver.id == "torch":
            return self._torch_is_torch and call.func.attr in _PURE_TORCH_FUNCTIONS
        # What belongs to self may be a module, which `self.proj.to(...)` changes.
        return call.func.attr in _PURE_METHODS and not self._belongs_to_self(receiver) and self.pure(receiver)

    def _belongs_to_self(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute | ast.Subscript):
            # Only tensors take an index like [None] or [:, None].
            if isinstance(node, ast.Subscript) and any(_is_none(part) for part in ast.walk(node.slice)):
                return False
            node = node.value
        return isinstance(node, ast.Name) and node.id == self.self_name

    # ----------------------------------------------------------------------------------------- changes

    def _flows(self) -> Iterator[set[str]]:
        """Groups of names between which a tensor may pass."""
        for node in self._nodes:
            if isinstance(node, ast.Assign):
                yield self.names(node.value).union(*map(self.names, node.targets))
            elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
                yield self.names(node.target) | self.names(node.value)
            elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
                yield self.names(node.target) | self.names(node.iter)
            elif isinstance(node, ast.withitem):
                yield self.names(node.context_expr) | self.names(node.optional_vars)
            elif isinstance(node, ast.Match):
                yield self.names(node.subject).union(*map(_captures, node.cases))
            elif isinstance(node, ast.Call):
                yield self._reach(node)

    def _changed_by(self, nodes: Iterable[ast.AST]) -> set[str]:
        """Names whose tensors are visibly changed in place."""
        changed: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.AugAssign):
                changed |= self.names(node.target)
            elif isinstance(node, ast.Subscript | ast.Attribute) and _stores(node) and not _is_dict_key(node):
                changed |= self.names(node.value)
            elif isinstance(node, ast.Call) and _is_in_place(node):
                changed |= self._reach(node)
        return changed

    def _all_changes(self) -> Iterator[tuple[int, tuple[ast.stmt, ...], set[str]]]:
        """(position, loops around it, names) of each statement that changes tensors in place."""
        for position, statement in enumerate(self.statements):
            nodes = list(_own_nodes(statement))
            if changed := self._changed_by(nodes):
                runs_later = any(isinstance(node, _LATER) for node in nodes)
                yield len(self.statements) if runs_later else position, self._places[id(statement)].loops, changed

    def _aliases(self, names: Iterable[str]) -> set[str]:
        return set().union(*(self._groups.get(name, {name}) for name in names))

    def check_unchanged_later(self, statement: ast.stmt, names: Iterable[str]) -> None:
        """Raise LeftEager if a tensor of `names` may be edited in place from here on, or in a loop around it."""
        kept = self._aliases(names)
        loops = self._places[id(statement)].loops
        for position, other_loops, changed in self._changes:
            repeats = any(loop in loops for loop in other_loops)
            if (repeats or position >= self.statements.index(statement)) and changed & kept:
                raise LeftEager(f"{_listed(changed & kept)} may be changed in place later")

    def check_movable(
        self,
        first: ast.stmt,
        last: ast.stmt,
        use: ast.expr,
        names: Iterable[str],
        is_norm_call: Callable[[ast.AST], bool],
        not_run: ast.stmt | None = None,
    ) -> list[ast.expr]:
        """Prove that a pure expression of `names` is the same at `use` in `last` as at `first`.

        What `not_run` does in between does not count.

        Returns:
            The norms called in between; the proof holds while they are plain.

        Raises:
            LeftEager: something in between may change it.
        """
        kept = self._aliases(names)
        block, begin, end = self._places[id(first)].block, self._places[id(first)].index, self._places[id(last)].index
        norms = []
        for statement in (statement for statement in block[begin + 1 : end + 1] if statement is not not_run):
            changed = self._changed_by(ast.walk(statement))
            if changed & kept:
                raise LeftEager(f"{_listed(changed & kept)} may be changed in between")
            if any(isinstance(node, ast.Attribute) and _stores(node) for node in ast.walk(statement)):
                raise LeftEager("an attribute is assigned in between")
            for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
                runs_after_use = any(node is use for node in ast.walk(call))
                casts_norm = _method(call) in _PURE_METHODS and is_norm_call(call.func.value)
                if self._pure_call(call) or casts_norm or runs_after_use:
                    continue
                if is_norm_call(call):
                    norms.append(call.func)
                    continue
                if not self.path(call.func):
                    raise LeftEager(f"{ast.unparse(call.func)}(), which may have any effect, is called in between")
                changed |= self._reach(call) | {name for name in kept if name.startswith("self.")}
            if changed & kept:
                raise LeftEager(f"{_listed(changed & kept)} may be changed in between")
        return norms

    # -------------------------------------------------------------------------------------------- uses

    def uses(self, definition: ast.Assign, name: str) -> list[ast.Name]:
        """All reads of the value that `definition` gives to `name`, if they stand in its own basic block.

        Raises:
            LeftEager: it may be read elsewhere too: after the block, in a nested one, in a loop's next round.
        """
        if any(isinstance(node, ast.NamedExpr) and node.target.id == name for node in self._nodes):
            raise LeftEager(f"{name} is also assigned within an expression")
        place = self._places[id(definition)]
        uses: list[ast.Name] = []
        replaced = False
        for statement in place.block[place.index + 1 :]:
            if isinstance(statement, ast.If) and not any(getattr(n, "id", None) == name for n in ast.walk(statement)):
                continue
            if not isinstance(statement, _SIMPLE) or replaced:
                break
            uses += [node for node in ast.walk(statement) if self._is_read(node, name)]
            replaced = name in _assigned(statement)
        accounted = set(map(id, uses))
        for node in (node for node in self._variables if self._is_read(node, name) and id(node) not in accounted):
            # A value replaced in its own block can be seen from outside only after an exception or in a closure.
            harmless = (_position(node) <= _end(definition) and not place.loops) or (replaced and not place.guarded)
            if id(node) in self._in_scopes or not harmless:
                raise LeftEager(f"{name} is also read outside the basic block that computes it")
        return uses

    def _is_read(self, node: ast.AST, name: str) -> bool:
        is_variable = isinstance(node, ast.Name) and node.id == name
        return is_variable and (not isinstance(node.ctx, ast.Store) or id(node) in self._augmented)

    def assigned_before(self, statement: ast.stmt, name: str) -> tuple[ast.stmt | None, ast.If | None]:
        """The statement before this one that assigns a variable last, if both stand in one basic block.

        And the `if` without `else` that may stand between them, and that ends in another assignment of the variable.
        """
        place, branch = self._places[id(statement)], None
        for earlier in reversed(place.block[: place.index]):
            if isinstance(earlier, _SIMPLE):
                if _assigns(earlier, name):
                    return earlier, branch
            elif branch is None and isinstance(earlier, ast.If) and not earlier.orelse and self.pure(earlier.test):
                if not _assigns(earlier.body[-1], name):
                    return None, None
                branch = earlier
            else:
                return None, None
        return None, None

    def stored_between(self, first: ast.stmt, last: ast.stmt) -> set[str]:
        """Variables assigned by the statements between two of the same block."""
        block, begin, end = self._places[id(first)].block, self._places[id(first)].index, self._places[id(last)].index
        nodes = (node for statement in block[begin + 1 : end] for node in ast.walk(statement))
        return {node.id for node in nodes if isinstance(node, ast.Name) and _stores(node)}


def _joined(groups: Iterable[set[str]]) -> dict[str, set[str]]:
    """Merge overlapping groups; each name leads to its whole group."""
    merged: dict[str, set[str]] = {}
    for group in groups:
        whole = set(group).union(*(merged.get(name, ()) for name in group))
        merged.update(dict.fromkeys(whole, whole))
    return merged


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        if block := getattr(statement, field, None):
            yield block
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement without those of the statements inside it; all of them for a nested function."""
    if isinstance(statement, _SCOPES):
        yield from ast.walk(statement)
        return
    yield statement
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from ast.walk(child)


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _is_in_place(call: ast.Call) -> bool:
    name = _method(call) or getattr(call.func, "id", "")
    return name.endswith("_") or any(k.arg in ("out", "inplace") for k in call.keywords)


def _is_dict_key(node: ast.Subscript | ast.Attribute) -> bool:
    index = node.slice if isinstance(node, ast.Subscript) else None
    return isinstance(index, ast.Constant) and isinstance(index.value, str)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _captures(case: ast.match_case) -> set[str]:
    names = (getattr(node, "name", None) or getattr(node, "rest", None) for node in ast.walk(case.pattern))
    return set(filter(None, names))


def _assigns(statement: ast.stmt, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name and _stores(node) for node in ast.walk(statement))


def _assigned(statement: ast.stmt) -> set[str]:
    """Variables that a simple statement certainly assigns."""
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target] if statement.value is not None else []
    else:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name) and _stores(node)}


def _stores(node: ast.Name | ast.Attribute | ast.Subscript) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _position(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: ast.AST) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
