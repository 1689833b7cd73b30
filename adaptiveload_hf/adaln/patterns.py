"""Where does a forward modulate a norm's result or add a gated branch?

The patterns: `norm(x) * (1 + scale) + shift` and `x + gate * y`, where a variable may hold the norm's result or the
product, and a cast back to x's dtype may stand around; and `norm(x.float()).type_as(x)`, a norm between two casts.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .effects import Effects
from .source import LeftEager


@dataclass
class Site:
    """One place where a forward modulates a norm's result or adds a gated branch.

    Args:
        kind: "modulation", "gate", "norm" (between two casts), or "pair" (a residual and the norm of it).
        text: its expression, shortened.
        reason: why it stays eager; None once it is fused.
    """

    kind: str
    text: str
    reason: str | None


@dataclass
class Match:
    """An expression that has the form of a site.

    Args:
        node: the sum (or product, or norm) itself.
        outer: the cast around it, else `node`.
        statement: what it stands in.
        main: the normed value, or x of `x + gate * y`.
        second: scale, or the product `gate * y`, or the variable that may hold it.
        shift: of a modulation, None if it has none.
        rows: `:, a:b` if a modulation reads these rows of `main` only.
        one_is_added: whether the scale holds the 1 already.
        cast_back: whether the op casts as `outer` does; known once it is fused.
    """

    site: Site
    node: ast.expr
    outer: ast.expr
    statement: ast.stmt
    main: ast.expr
    second: ast.expr
    shift: ast.expr | None = None
    rows: ast.expr | None = None
    one_is_added: bool = False
    cast_back: bool = False

    @property
    def replaced(self) -> ast.expr:
        """What the op stands for."""
        return self.outer if self.cast_back else self.node

    def fold_cast(self, x: ast.expr) -> tuple[ast.expr, bool]:
        """(x itself, True) if the cast around leads back to the dtype of a variable x, given as `x` or `x.float()`."""
        dtype = cast(self.outer)[1] if self.outer is not self.node else None
        raw_x = without_float(x)
        if isinstance(raw_x, ast.Name) and dtype is not None and ast.unparse(dtype) == f"{raw_x.id}.dtype":
            return raw_x, True
        return x, False


class Finder:
    """Finds the sites of one function.

    Args:
        effects: the analysis of its tree.
        is_norm: whether `self.<path>` is a norm that an op stands for; `path` as in the source.

    Attributes:
        definitions: the statements `v = norm(x)` (or with a cast around the norm) and `v = gate * y`.
        matches: all that has the form of a site, in the order of the source.
    """

    def __init__(self, effects: Effects, is_norm: Callable[[str], bool]):
        self._effects = effects
        self._is_norm = is_norm
        statements = [s for s in effects.statements if effects.may_run(s)]
        self.definitions = [s for s in statements if self.is_norm_definition(s) or self._is_gate_definition(s)]
        norms = [self.is_norm_definition(definition) for definition in self.definitions]
        self._norm_variables = {s.targets[0].id for s, is_norm in zip(self.definitions, norms) if is_norm}
        self._gate_variables = {s.targets[0].id for s, is_norm in zip(self.definitions, norms) if not is_norm}
        simple = [s for s in statements if effects.is_simple(s)]
        self.matches = [match for statement in simple for match in self._find(statement, statement, nested=False)]

    def is_norm_definition(self, statement: ast.stmt) -> bool:
        """`v = norm(x)`, or that with a cast around."""
        return _assigns_variable(statement) and self.is_norm_call(cast(statement.value)[0])

    def _is_gate_definition(self, statement: ast.stmt) -> bool:
        return _assigns_variable(statement) and self.gate_and_branch(statement.value) is not None

    def is_norm_call(self, node: ast.AST) -> bool:
        """A call of a known norm of self with one argument."""
        is_call = isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords
        path = self._effects.path(node.func) if is_call and not isinstance(node.args[0], ast.Starred) else None
        return path is not None and self._is_norm(path)

    def gate_and_branch(self, product: ast.AST) -> tuple[ast.expr, ast.expr] | None:
        """(gate, y) of a product of which exactly one factor is a gate by its name."""
        for gate, y in _both_ways(product, ast.Mult):
            if self._is_gate(gate) and not self._is_gate(y):
                return gate, y
        return None

    def _is_gate(self, factor: ast.expr) -> bool:
        words = (getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(factor))
        return any("gate" in word for word in words) and self._effects.pure(factor)

    def readers(self, definition: ast.Assign) -> list[Match]:
        """Matches after a definition that use its variable and are not yet fused."""
        kind, part = ("modulation", "main") if self.is_norm_definition(definition) else ("gate", "second")
        name = definition.targets[0].id
        found = [m for m in self.matches if m.site.kind == kind and getattr(getattr(m, part), "id", None) == name]
        return [m for m in found if m.site.reason is not None and m.statement.lineno > definition.lineno]

    def only_uses(self, definition: ast.Assign, readers: list[Match], part: str) -> tuple[list[Match], list[ast.Name]]:
        """The readers of what a definition gives its variable, and reads of a norm's device until the last of them.

        Raises:
            LeftEager: something else reads it.
        """
        name = definition.targets[0].id
        uses = self._effects.uses(definition, name)
        matches = [match for match in readers if any(getattr(match, part) is use for use in uses)]
        last = matches[-1].statement.end_lineno if matches and part == "main" else 0
        nodes = (node for statement in self._effects.statements for node in ast.walk(statement))
        attributes = [node for node in nodes if isinstance(node, ast.Attribute) and node.lineno <= last]
        of_device = {id(node.value) for node in attributes if node.attr == "device"}
        devices = [use for use in uses if id(use) in of_device]
        if len(matches) + len(devices) != len(uses) or not matches:
            raise LeftEager(f"{name} is used otherwise too")
        return matches, devices

    def _find(self, node: ast.AST, statement: ast.stmt, nested: bool) -> Iterator[Match]:
        inner = cast(node)[0]
        forms = (self._modulation, self._gate, self._norm_between_casts)
        match = next(filter(None, (form(inner, node, statement) for form in forms)), None)
        if match is not None:
            if nested:
                match.site.reason = "it stands in a nested function or comprehension"
                match.main = match.second = ast.Constant(None)
            yield match
        nested = nested or isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp)
        parts = ast.iter_child_nodes(node) if match is None else (match.main, match.second, match.shift)
        for part in filter(None, parts):
            yield from self._find(part, statement, nested)

    def _modulation(self, node: ast.AST, outer: ast.AST, statement: ast.stmt) -> Match | None:
        for product, shift in _both_ways(node, ast.Add) or [(node, None)]:
            for value, factor in _both_ways(product, ast.Mult):
                normed, rows = _rows_of(value)
                known = self.is_norm_call(cast(normed)[0]) or getattr(normed, "id", None) in self._norm_variables
                scale, one_is_added = _without_one(factor), False
                if scale is None and known and _named(factor, "scale"):
                    scale, one_is_added = factor, True
                if scale is not None and (known or (shift is not None and not isinstance(normed, ast.Constant))):
                    site = Site("modulation", shortened(node), "it modulates no result of a known norm")
                    return Match(site, node, outer, statement, normed, scale, shift, rows, one_is_added)
        for normed, shift in _both_ways(node, ast.Add):  # a shift alone
            if self.is_norm_call(cast(normed)[0]) and _named(shift, "shift"):
                site = Site("modulation", shortened(node), "")
                return Match(site, node, outer, statement, normed, ast.Constant(None), shift)
        return None

    def _gate(self, node: ast.AST, outer: ast.AST, statement: ast.stmt) -> Match | None:
        for x, product in _both_ways(node, ast.Add):
            if self.gate_and_branch(product) or getattr(product, "id", None) in self._gate_variables:
                site = Site("gate", shortened(node), "its product is not computed in the same basic block")
                return Match(site, node, outer, statement, x, product)
        return None

    def _norm_between_casts(self, node: ast.AST, outer: ast.AST, statement: ast.stmt) -> Match | None:
        if node is outer or not self.is_norm_call(node) or without_float(node.args[0]) is node.args[0]:
            return None
        match = Match(Site("norm", shortened(outer), ""), node, outer, statement, node, ast.Constant(None))
        return match if match.fold_cast(node.args[0])[1] else None

    def residual_of(self, statement: ast.stmt) -> Match | None:
        """The match of a sum that a statement `x = ...` assigns as a whole, gated or not."""
        if not _assigns_variable(statement) or not self._effects.may_run(statement):
            return None
        node = cast(statement.value)[0]
        for match in (match for match in self.matches if match.node is node):
            return match if match.site.kind == "gate" else None
        sums = [Match(Site("sum", "", None), node, statement.value, statement, *s) for s in _both_ways(node, ast.Add)]
        if not sums or any(isinstance(part, ast.Constant) for part in (node.left, node.right)):
            return None
        return next((match for match in sums if match.fold_cast(match.main)[1]), sums[0])


def cast(node: ast.AST) -> tuple[ast.AST, ast.expr | None]:
    """(v, dtype) for `v.type_as(y)`, `v.to(y.dtype)` and `v.to(dtype=dtype)`, else (node, None)."""
    method = _method_call(node, 1)
    if method == "type_as":
        return node.func.value, ast.copy_location(ast.Attribute(node.args[0], "dtype", ast.Load()), node)
    if method == "to" and isinstance(node.args[0], ast.Attribute) and node.args[0].attr == "dtype":
        return node.func.value, node.args[0]
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args
    if is_call and node.func.attr == "to" and [keyword.arg for keyword in node.keywords] == ["dtype"]:
        return node.func.value, node.keywords[0].value
    return node, None


def without_float(node: ast.expr) -> ast.expr:
    """`x` for `x.float()`, else the node."""
    return node.func.value if _method_call(node, 0) == "float" else node


def rows_and_table(operand: ast.expr, drop_float: bool) -> tuple[ast.expr, ast.expr | None]:
    """(m, t) for `m + t` where t is a table by its name (`m.float() + t` too if that cast is lost later)."""
    is_sum = isinstance(operand, ast.BinOp) and isinstance(operand.op, ast.Add)
    names = [getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(operand.right)] if is_sum else []
    if any("table" in name for name in names):
        return without_float(operand.left) if drop_float else operand.left, operand.right
    return operand, None


def shortened(node: ast.AST) -> str:
    """The source of a node in at most 60 characters."""
    text = ast.unparse(node)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _rows_of(node: ast.expr) -> tuple[ast.expr, ast.expr | None]:
    """(v, `:, a:b`) for `v[:, a:b]`, else (node, None). Rows of the second dimension are normed each by itself."""
    rows = node.slice.elts if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) else []
    plain = len(rows) == 2 and all(isinstance(part, ast.Slice) and part.step is None for part in rows)
    if plain and rows[0].lower is None and rows[0].upper is None:
        return node.value, node.slice
    return node, None


def _named(operand: ast.expr, word: str) -> bool:
    """A variable called a scale or a shift, or rows of it. (A scale may hold its 1 already: `scale = 1 + scale`.)"""
    return any(word in node.id for node in ast.walk(operand) if isinstance(node, ast.Name))


def _assigns_variable(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Assign)
        and len(statement.targets) == 1
        and isinstance(statement.targets[0], ast.Name)
    )


def _both_ways(node: ast.AST, operator: type) -> list[tuple[ast.expr, ast.expr]]:
    """The operands of a sum or product in both orders; nothing for other nodes."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, operator):
        return [(node.left, node.right), (node.right, node.left)]
    return []


def _method_call(node: ast.AST, arguments: int) -> str | None:
    """The name of the method that a node calls with so many positional arguments and nothing else."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node.func.attr if is_call and len(node.args) == arguments and not node.keywords else None


def _without_one(node: ast.expr) -> ast.expr | None:
    """`s` for `1 + s`, and `s[:, None]` for `(1 + s)[:, None]` (`unsqueeze` alike); else None."""
    for one, scale in _both_ways(node, ast.Add):
        if isinstance(one, ast.Constant) and type(one.value) in (int, float) and one.value == 1:
            return scale
    if isinstance(node, ast.Subscript) and (scale := _without_one(node.value)) is not None:
        return ast.copy_location(ast.Subscript(scale, node.slice, node.ctx), node)
    if _method_call(node, 1) == "unsqueeze" and (scale := _without_one(node.func.value)) is not None:
        return ast.copy_location(ast.Call(ast.Attribute(scale, "unsqueeze", ast.Load()), node.args, []), node)
    return None
