"""Where is a residual normalised next, so that one op does both?

x = x + gate * y                         or without a gate, and with casts around
...                                      the same basic block, or an `if` that ends in another such sum
n = norm(x) * (1 + scale) + shift        or held in a variable first, or the norm alone between two casts
"""

import ast
from dataclasses import dataclass

from .effects import Effects
from .patterns import Finder, Match, Site, shortened, without_float
from .source import LeftEager


@dataclass
class FusedNorm:
    """A norm that became an op.

    Args:
        match: what modulates it, or the norm between casts.
        call: the call of the norm, in `match` or in the definition of the variable that `match` reads.
        definition: the statement of that call.
        unless_plain: in a definition, what calls the norm only if it must: `None if is_plain(norm) else norm(x)`.
    """

    match: Match
    call: ast.Call
    definition: ast.stmt
    unless_plain: ast.IfExp | None = None


@dataclass
class Pair:
    """A residual and the norm of it.

    Args:
        branch: an `if` in between. While it is not taken, the residual before it is the one that is normalised, else
            that at its end.
        at_its_end: which of the two this one is.
    """

    site: Site
    residual: Match
    norm: FusedNorm
    branch: ast.If | None
    at_its_end: bool


def find_pairs(effects: Effects, finder: Finder, norms: list[FusedNorm]) -> list[Pair]:
    """All pairs by their form. No two share a residual: the first norm takes it."""
    pairs: dict[int, Pair] = {}
    for norm in sorted(norms, key=lambda norm: norm.match.statement.lineno):
        x = without_float(norm.call.args[0])
        first, branch = effects.assigned_before(norm.definition, x.id) if isinstance(x, ast.Name) else (None, None)
        statements = [first] if branch is None else [first, branch.body[-1]]
        residuals = [finder.residual_of(statement) for statement in statements if statement is not None]
        if not residuals or residuals[0] is None or id(first) in pairs:
            continue
        for statement, residual in zip(statements, residuals):
            if residual is not None:
                text = f"{shortened(residual.node)}, then {shortened(norm.call)}"
                at_its_end = statement is not first
                pairs[id(statement)] = Pair(Site("pair", text, ""), residual, norm, branch, at_its_end)
    return list(pairs.values())


def check_movable_up(effects: Effects, finder: Finder, pair: Pair) -> list[ast.expr]:
    """Prove that the norm and its modulation give at the residual what they give where they stand.

    Returns:
        The other norms called in between; the proof holds while they are plain.

    Raises:
        LeftEager: something in between may change an operand.
    """
    first, match = pair.branch if pair.at_its_end else pair.residual.statement, pair.norm.match
    operands = [node for node in (match.second, match.shift) if node is not None]
    operands += [pair.branch.test] if pair.branch is not None and not pair.at_its_end else []
    residual = pair.residual.statement.targets[0]
    read = {node.id for operand in operands for node in ast.walk(operand) if isinstance(node, ast.Name)}
    rebound = (effects.stored_between(first, match.statement) | {residual.id}) & read
    if rebound:
        raise LeftEager(f"{', '.join(sorted(rebound))} is assigned after the residual")
    names = set().union(*map(effects.names, [residual, pair.norm.call.func, *operands]))
    between = effects.check_movable(first, match.statement, match.main, names, finder.is_norm_call, pair.branch)
    return [norm for norm in between if ast.unparse(norm) != ast.unparse(pair.norm.call.func)]
