"""What does a forward look like whose proven sites are fused?

Each site gets at each call what the fused op gives, or nothing if that does not apply, and then runs the original
expression:

    (_adaln.modulate(self.norm, x, scale=scale, shift=shift) or (self.norm(x) * (1 + scale) + shift,))[0]

A residual whose norm comes next gives both at once, and the norm's place takes what was given:

    x, n = _adaln.pair(...) or (<x + gate * y as above>, None)
    y = n if n is not None else <norm(x) * (1 + scale) + shift as above>

What `effects` cannot prove to be movable stays as it is.
"""

import ast
import copy
from collections.abc import Callable, Iterable

from .effects import Effects
from .pairs import FusedNorm, Pair, check_movable_up, find_pairs
from .patterns import Finder, Match, Site, cast, rows_and_table, shortened, without_float
from .source import LeftEager

PREFIX = "_adaln"


class Rewriter:
    """Rewrites one function, in place.

    Args:
        function: its tree.
        function_globals: its globals.
        norms: the op of each norm `self.a.b`, by `a.b` as in the source; None where this child is absent.
        names: the ops to use.
        decided: as for `Effects`. What never runs stays as it is, and is no site.
    """

    def __init__(
        self,
        function: ast.FunctionDef,
        function_globals: dict,
        norms: dict[str, str | None],
        names: frozenset[str],
        decided: dict[str, bool],
    ):
        self._function = function
        self._norms = norms
        self._names = names
        self._effects = Effects(function, function_globals, decided)
        self._finder = Finder(self._effects, norms.__contains__)
        self._new_expressions: dict[int, ast.expr] = {}
        self._new_statements: dict[int, list[ast.stmt]] = {}
        self._dropped: dict[int, list[ast.Name]] = {}
        self._fused_norms: list[FusedNorm] = []
        self._bindings: dict[int, dict[str, tuple[ast.expr, ast.expr]]] = {}
        self._pairs: list[Pair] = []
        self._given: dict[int, ast.Name] = {}
        self._number = 0

    @property
    def sites(self) -> list[Site]:
        """All that were found, fused or not."""
        return [match.site for match in (*self._finder.matches, *self._pairs)]

    def run(self) -> bool:
        """Rewrite; whether anything changed. `sites` then tells what and what not.

        Raises:
            LeftEager: the function as a whole does something that cannot be followed.
        """
        self._effects.check_followed()
        if any(isinstance(n, ast.Name) and n.id.startswith(PREFIX) for n in ast.walk(self._function)):
            raise LeftEager(f"its forward uses names that begin with {PREFIX}")
        for match in self._finder.matches:
            if match.site.kind == "modulation" and self._finder.is_norm_call(cast(match.main)[0]):
                self._attempt_modulation(match)
            elif match.site.kind == "gate" and isinstance(match.second, ast.BinOp):
                self._attempt([match], self._wants_gates, lambda match=match: self._fuse_gate(match))
        for definition in self._finder.definitions:
            readers = self._finder.readers(definition)
            if self._finder.is_norm_definition(definition):
                fuse, wanted = self._fuse_held_norm, self._wants(cast(definition.value)[0])
            else:
                fuse, wanted = self._fuse_held_product, self._wants_gates
            self._attempt(readers, wanted, lambda fuse=fuse, d=definition, readers=readers: fuse(d, readers))
        for match in [match for match in self._finder.matches if match.site.kind == "norm"]:
            if id(match.statement) in self._new_statements:  # it is part of a modulation
                self._finder.matches.remove(match)
            else:
                self._attempt_modulation(match)
        if "gate_residual_layer_norm_modulate" in self._names:
            pairs = find_pairs(self._effects, self._finder, self._fused_norms)
            self._pairs = [pair for pair in pairs if self._has_op(pair)]
            for pair in self._pairs:
                self._attempt([pair], True, lambda pair=pair: self._fuse_pair(pair))
        if self._new_expressions:
            _Replacer(self._new_expressions, self._new_statements, self._dropped).visit(self._function)
            ast.fix_missing_locations(self._function)
            return True
        return False

    def _attempt_modulation(self, match: Match) -> None:
        self._attempt([match], self._wants(cast(match.main)[0]), lambda: self._fuse_modulation(match))

    @property
    def _wants_gates(self) -> bool:
        return "gate_residual" in self._names

    def _op_of(self, norm_call: ast.Call) -> str | None:
        return self._norms[self._effects.path(norm_call.func)]

    def _wants(self, norm_call: ast.Call) -> bool:
        return self._op_of(norm_call) in {*self._names, None}

    def _has_op(self, pair: Pair) -> bool:
        is_fused = pair.residual.site.reason is None
        return is_fused and self._op_of(pair.norm.call) in ("layer_norm_modulate", None)

    def _attempt(self, matches: list[Match | Pair], wanted: bool, fuse: Callable[[], Iterable]) -> None:
        if not matches:
            return
        try:
            if not wanted:
                raise LeftEager("its op was not asked for")
            for match in fuse():
                match.site.reason = None
        except LeftEager as error:
            for match in matches:
                match.site.reason = str(error)

    # ------------------------------------------------------------------------------ sites of one expression

    def _fuse_modulation(self, match: Match) -> list[Match]:
        norm_call, dtype = cast(match.main)
        norm, x = norm_call.func, norm_call.args[0]
        raw_x, match.cast_back = match.fold_cast(x)
        if match.rows is not None:
            raise LeftEager("rows of a norm's result are read from no variable")
        self._check_pure(x, match.second, match.shift, dtype)
        self._check_kept(match.statement, raw_x, match.second)
        self._modulate(match, norm, raw_x, _copied(match.replaced), dtype)
        if dtype is None:
            self._fused_norms.append(FusedNorm(match, norm_call, match.statement))
        return [match]

    def _modulate(self, match, norm, x, literal, dtype, is_plain=None) -> None:
        """`dtype`: what a cast around the norm leads to."""
        options = _cast_back(match)
        if dtype is not None and not match.cast_back:
            options["dtype"] = dtype
        if match.one_is_added:
            if self._norms[self._effects.path(norm)] == "layer_norm_modulate":
                raise LeftEager("its op adds the 1 to the scale itself")
            options["scale_offset"] = ast.Constant(0.0)
        fused = _call("modulate", norm, x, **self._modulation(norm, match), **options)
        fused = ast.BoolOp(ast.And(), [is_plain, fused]) if is_plain else fused
        self._new_expressions[id(match.replaced)] = _first(fused, literal)

    def _modulation(self, norm: ast.expr, match: Match) -> dict[str, ast.expr]:
        """Scale, shift and the tables added to them."""
        operands = {}
        for name, node in (("scale", match.second), ("shift", match.shift or ast.Constant(None))):
            rows, table = node, None
            if self._norms[self._effects.path(norm)] != "rms_norm_modulate":  # whose op takes no tables
                rows, table = rows_and_table(node, match.cast_back)
            operands[name] = rows
            if table is not None:
                operands[f"{name}_table"] = table
        return operands

    def _fuse_gate(self, match: Match) -> list[Match]:
        gate, y = self._finder.gate_and_branch(match.second)
        self._add_gated(match, *self._bind_sum(match, y, gate))
        return [match]

    def _bind_sum(self, match: Match, y: ast.expr, gate: ast.expr):
        """What evaluates x, y and gate and what then stands for each; and the latter by what they stand for.

        Each operand is evaluated once, in the order of the source.
        """
        x, match.cast_back = match.fold_cast(match.main)
        raw_y = without_float(y) if match.cast_back else y
        if x is not match.main and not self._effects.pure(raw_y):
            raise LeftEager("x is cast before its branch is computed")
        if raw_y is not y:
            self._check_kept(match.statement, raw_y)
        rows, table = rows_and_table(gate, match.cast_back)
        parts = [("x", x), ("y", raw_y), ("gate", rows), *([("gate_table", table)] if table is not None else [])]
        parts.sort(key=lambda item: _position(item[1]))
        bindings = {name: self._bind(name[0], part) for name, part in parts}
        return bindings, {id(part): bindings[name][1] for name, part in parts}

    def _add_gated(self, match: Match, bindings, substitutes) -> None:
        """`bindings`: for x, y and gate what evaluates it and what then stands for it."""
        used = {name: use for name, (_, use) in bindings.items()}
        fused = _call("gate_residual", **{name: bound for name, (bound, _) in bindings.items()}, **_cast_back(match))
        self._new_expressions[id(match.replaced)] = _first(fused, _copied(match.replaced, substitutes))
        self._bindings[id(match)] = bindings
        self._drop_after(match.statement, used["y"])

    # -------------------------------------------------------------------------- sites held in a variable

    def _fuse_held_norm(self, definition: ast.Assign, readers: list[Match]) -> list[Match]:
        """`n = norm(x)` becomes: keep x, and call the norm now only if it is not plain. The uses of n modulate x."""
        matches, devices = self._finder.only_uses(definition, readers, "main")
        norm_call, dtype = cast(definition.value)
        norm, x = norm_call.func, norm_call.args[0]
        raw_x, norms = without_float(x), {ast.unparse(norm): norm}
        self._check_pure(dtype)
        for match in matches:
            self._check_pure(match.second, match.shift, match.rows)
            self._check_kept(match.statement, match.second)
            norms_between = self._check_movable(definition, match, match.main, self._effects.names(x))
            norms |= {ast.unparse(other): other for other in norms_between}
            rebound = self._effects.stored_between(definition, match.statement) & self._effects.names(raw_x)
            match.cast_back = match.fold_cast(x)[1] and not rebound
        if raw_x is not x and dtype is None and not all(match.cast_back for match in matches):
            raise LeftEager("its input is cast, and not every use casts back to the input's dtype")
        self._check_kept(definition, x)
        kept_x, normed = self._new_name("x"), self._new_name("n")
        kept_dtype = dtype and self._new_name("d")
        call = _copied(definition.value, {id(raw_x): kept_x, id(dtype): kept_dtype})
        is_plain = ast.Compare(normed, [ast.Is()], [ast.Constant(None)])
        unless_plain = ast.IfExp(_call("is_plain", *norms.values()), ast.Constant(None), call)
        kept = [(kept_x, raw_x), (kept_dtype, dtype), (normed, unless_plain)]
        self._new_statements[id(definition)] = [_assign(name, value) for name, value in kept if value is not None]
        on_device = {id(read): ast.IfExp(is_plain, kept_x, normed) for read in devices}
        self._new_expressions |= on_device
        for match in matches:
            literal = _copied(match.replaced, {id(match.main): ast.IfExp(is_plain, call, normed), **on_device})
            x_now = kept_x if match.rows is None else ast.Subscript(kept_x, match.rows, ast.Load())
            self._modulate(match, norm, x_now, literal, kept_dtype, is_plain)
        self._drop_after(matches[-1].statement, kept_x, normed)
        if len(matches) == 1 and matches[0].rows is None and dtype is None:
            self._fused_norms.append(FusedNorm(matches[0], norm_call, definition, unless_plain))
        return matches

    def _fuse_held_product(self, definition: ast.Assign, readers: list[Match]) -> list[Match]:
        """`v = gate * y` becomes: keep gate and y. The use `x + v` then adds both."""
        (match, *more), _ = self._finder.only_uses(definition, readers, "second")
        if more:
            raise LeftEager(f"{definition.targets[0].id} is added more than once")
        gate, y = self._finder.gate_and_branch(definition.value)
        x, match.cast_back = match.fold_cast(match.main)
        raw_y = without_float(y) if match.cast_back else y
        kept = self._effects.names(gate) | self._effects.names(raw_y)
        if self._check_movable(definition, match, match.second, kept):
            raise LeftEager("a norm is called in between")
        if raw_y is not y:
            self._check_kept(definition, raw_y)
        names = {"y": self._new_name("y"), "gate": self._new_name("g")}
        parts = sorted([("y", raw_y), ("gate", gate)], key=lambda item: _position(item[1]))
        self._new_statements[id(definition)] = [_assign(names[name], part) for name, part in parts]
        bindings = {"x": self._bind("x", x), **{name: (value, value) for name, value in names.items()}}
        product = _copied(definition.value, {id(part): names[name] for name, part in parts})
        self._add_gated(match, bindings, {id(match.second): product, id(x): bindings["x"][1]})
        return [match]

    # ------------------------------------------------------------------------- a residual and its next norm

    def _fuse_pair(self, pair: Pair) -> list[Pair]:
        """The residual's statement gives its norm too, if the op applies; the place of the norm takes that."""
        residual, norm, statement = pair.residual, pair.norm.match, pair.residual.statement
        others = check_movable_up(self._effects, self._finder, pair)
        bindings, alone = self._residual_alone(residual)
        if statement.value is not residual.replaced:
            raise LeftEager("its residual is cast to another dtype")
        if pair.at_its_end and id(norm) not in self._given:
            raise LeftEager("the residual before the branch makes no pair")
        normed = self._given.get(id(norm)) or self._take_given(pair.norm)
        operands = {name: bound for name, (bound, _) in bindings.items()}
        func = pair.norm.call.func
        operands |= {"norm": func, **self._modulation(func, norm), **_cast_back(residual)}
        operands |= _flag(norm_casts_back=norm.cast_back)
        if others:
            operands["between"] = _tuple(*others)
        if pair.branch is not None and not pair.at_its_end:
            operands["unless"] = _copied(pair.branch.test)
        if residual.site.kind == "gate":  # whose operands the call for both has evaluated
            used = {name: use for name, (_, use) in bindings.items()}
            alone = _first(_call("gate_residual", **used, **_cast_back(residual)), alone.value.values[1].elts[0])
        either = ast.BoolOp(ast.Or(), [_call("pair", **operands), _tuple(alone, ast.Constant(None))])
        self._new_expressions[id(residual.replaced)] = either
        targets = _tuple(*statement.targets, normed, context=ast.Store())
        self._new_statements[id(statement)] = [ast.Assign([targets], residual.replaced)]
        return [pair]

    def _residual_alone(self, residual: Match):
        """(what evaluates x, y and gate and what then stands for each, the residual where the norm does not join)."""
        if residual.site.kind == "gate":
            return self._bindings[id(residual)], self._new_expressions[id(residual.replaced)]
        no_gate = ast.copy_location(ast.Constant(None), residual.second)
        bindings, substitutes = self._bind_sum(residual, residual.second, no_gate)
        self._drop_after(residual.statement, bindings["x"][1], bindings["y"][1])
        return bindings, _copied(residual.replaced, substitutes)

    def _take_given(self, norm: FusedNorm) -> ast.Name:
        """Where a norm stands, take what its residual gave, if it did; the variable for that."""
        normed = self._given[id(norm.match)] = self._new_name("n")
        given = ast.Compare(normed, [ast.IsNot()], [ast.Constant(None)])
        replaced = id(norm.match.replaced)
        self._new_expressions[replaced] = ast.IfExp(given, normed, self._new_expressions[replaced])
        if norm.unless_plain is not None:
            norm.unless_plain.test = ast.BoolOp(ast.Or(), [given, norm.unless_plain.test])
        self._drop_after(norm.match.statement, normed)
        return normed

    # ------------------------------------------------------------------------------------------ pieces

    def _check_pure(self, *operands: ast.expr | None) -> None:
        for operand in operands:
            if not self._effects.pure(operand):
                raise LeftEager(f"{shortened(operand)} may have an effect")

    def _check_kept(self, statement: ast.stmt, *operands: ast.expr) -> None:
        """The op keeps these for its backward, where eager may have kept copies."""
        self._effects.check_unchanged_later(statement, set().union(*map(self._effects.names, operands)))

    def _check_movable(self, definition: ast.Assign, match: Match, use: ast.expr, names: set[str]) -> list[ast.expr]:
        is_norm_call = self._finder.is_norm_call
        return self._effects.check_movable(definition, match.statement, use, names, is_norm_call)

    def _new_name(self, letter: str) -> ast.Name:
        self._number += 1
        return ast.Name(f"{PREFIX}_{letter}{self._number}", ast.Load())

    def _bind(self, letter: str, operand: ast.expr) -> tuple[ast.expr, ast.expr]:
        """(what evaluates an operand, what stands for its value afterwards)."""
        if isinstance(operand, ast.Name | ast.Constant):
            return operand, operand
        name = self._new_name(letter)
        return ast.NamedExpr(ast.Name(name.id, ast.Store()), operand), name

    def _drop_after(self, statement: ast.stmt, *values: ast.expr) -> None:
        """Let go of tensors once they are used, as eager does with its temporaries."""
        if not isinstance(statement, ast.Return):
            ours = [value for value in values if isinstance(value, ast.Name) and value.id.startswith(PREFIX)]
            self._dropped.setdefault(id(statement), []).extend(ours)


class _Replacer(ast.NodeTransformer):
    """Puts new expressions and statements where the old ones stand; new ones may contain old ones."""

    def __init__(self, expressions: dict[int, ast.expr], statements: dict[int, list[ast.stmt]], dropped: dict):
        self.expressions = expressions
        self.statements = statements
        self.dropped = dropped

    def visit(self, node: ast.AST):
        if not isinstance(node, ast.stmt):
            return self.generic_visit(self.expressions.pop(id(node), node))
        new = [self.generic_visit(statement) for statement in self.statements.get(id(node), [node])]
        return new + [_assign(name, ast.Constant(None)) for name in self.dropped.get(id(node), ())]


def _copied(node, substitutes: dict[int, ast.expr] | None = None):
    """A deep copy in which nodes, by identity, are replaced."""
    substitutes = substitutes or {}
    if id(node) in substitutes:
        return copy.deepcopy(substitutes[id(node)])
    if isinstance(node, list):
        return [_copied(item, substitutes) for item in node]
    if not isinstance(node, ast.AST):
        return node
    return type(node)(**{name: _copied(value, substitutes) for name, value in ast.iter_fields(node)})


def _call(function: str, *arguments: ast.expr, **keywords: ast.expr) -> ast.Call:
    named = [ast.keyword(name, value) for name, value in keywords.items()]
    return ast.Call(ast.Attribute(ast.Name(PREFIX, ast.Load()), function, ast.Load()), list(arguments), named)


def _flag(**flags: bool) -> dict[str, ast.expr]:
    return {name: ast.Constant(True) for name, is_set in flags.items() if is_set}


def _cast_back(match: Match) -> dict[str, ast.expr]:
    return _flag(cast_back=match.cast_back)


def _first(fused: ast.expr, literal: ast.expr) -> ast.expr:
    """What is in the tuple `fused` unless that is empty, else the literal."""
    either = ast.BoolOp(ast.Or(), [fused, _tuple(literal)])
    return ast.Subscript(either, ast.Constant(0), ast.Load())


def _tuple(*parts: ast.expr, context: ast.expr_context | None = None) -> ast.Tuple:
    return ast.Tuple(list(parts), context or ast.Load())


def _assign(name: ast.Name, value: ast.expr) -> ast.Assign:
    return ast.Assign([ast.Name(name.id, ast.Store())], value)


def _position(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset
