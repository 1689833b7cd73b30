"""What did patch_model do to a model, and what did it leave?"""

import weakref
from collections import Counter
from dataclasses import dataclass, field

from torch import nn

from ..errors import UserError
from . import attention
from .first_call import LEFT_ALONE
from .forwards import RewrittenForward

_SITES = {"modulations": "modulation", "gates": "gate", "norms": "norm", "pairs": "pair"}
_KINDS = (*_SITES, "attention")
_NAMES = {"attention": "attention processors"}


@dataclass
class _Row:
    """One class: its rewritten forwards (several if its instances hold different norms) and how often each is used;
    on how many of its instances an attention processor could be wrapped, and is."""

    forwards: Counter = field(default_factory=Counter)
    patched: Counter = field(default_factory=Counter)
    refusals: Counter = field(default_factory=Counter)
    notes: Counter = field(default_factory=Counter)
    attention_found: int = 0
    attentions: weakref.WeakSet = field(default_factory=weakref.WeakSet)
    attention_fused: int = 0

    def count(self, kind: str, *, fused: bool) -> int:
        """Sites of a kind over all instances, in the source: a branch that never runs counts too."""
        instances = self.patched if fused else self.forwards
        return sum(
            number * sum(site.kind == kind and not (fused and site.reason) for site in forward.sites)
            for forward, number in instances.items()
            if not (fused and forward.verdict in LEFT_ALONE)
        )

    @property
    def how(self) -> str:
        verdicts = sorted({forward.verdict.value for forward in self.patched})
        ways = [f"rewritten ({', '.join(verdicts)})"] if verdicts else []
        ways += ["processor wrapped"] if self.attention_fused else []
        return ", ".join(ways) or "eager"

    @property
    def reasons(self) -> list[str]:
        as_written = filter(None, map(attention.as_written, self.attentions))  # LoRA may have come since
        reasons = dict.fromkeys([*self.notes, *self.refusals, *as_written])
        for forward in self.patched:
            reasons.update((f"{site.text}: {site.reason}", None) for site in forward.sites if site.reason)
        return list(reasons)


class PatchReport:
    """What `patch_model` found, fused and left eager. Printing it shows a table and a line for each op.

    Args:
        backends: for each op, what it runs on.
        extension_missing: why the CUDA extension is not used although it was not declined, or None.
    """

    def __init__(self, backends: dict[str, str], extension_missing: str | None = None):
        self.backends = backends
        self.extension_missing = extension_missing
        self.instances_patched = 0
        self._rows: dict[str, _Row] = {}

    def add(self, forward: RewrittenForward, refusal: str | None, note: str | None = None) -> None:
        """Count one instance; `refusal` says why it was not patched, `note` what keeps more from being fused."""
        if not forward.sites and forward.reason is None:
            return
        row = self._rows.setdefault(forward.name, _Row())
        row.forwards[forward] += 1
        if note is not None:
            row.notes[note] += 1
        if forward.text and refusal is None:
            row.patched[forward] += 1
            self.instances_patched += 1
        else:
            row.refusals.update([refusal] if refusal else [f"{s.text}: {s.reason}" for s in forward.sites])

    def add_attention(self, module: nn.Module, owner: type, refusal: str | None) -> None:
        """Count one self-attention of a class; `refusal` says why its processor was not wrapped."""
        row = self._rows.setdefault(f"{owner.__module__}.{owner.__qualname__}", _Row())
        row.attention_found += 1
        if refusal is None:
            row.attentions.add(module)
            row.attention_fused += 1
            self.instances_patched += 1
        else:
            row.refusals.update([refusal])

    def source(self, class_name: str | type) -> str:
        """The generated code of a class: the class, or its name, alone or with its module.

        Raises:
            UserError: no such class was patched.
        """
        if isinstance(class_name, type):
            class_name = f"{class_name.__module__}.{class_name.__qualname__}"
        for name, row in self._rows.items():
            if row.patched and class_name in (name, name.rpartition(".")[2]):
                return "\n".join(dict.fromkeys(forward.text for forward in row.patched))
        patched = ", ".join(name.rpartition(".")[2] for name, row in self._rows.items() if row.patched)
        raise UserError(f"no class {class_name} was patched. These were: {patched}.")

    def to_dict(self) -> dict:
        """{"classes": [{"class", "instances", "<kind>_fused", "<kind>_found", "how", "left_eager"}], "backends":
        {op: where}, "extension_missing": str or None}, the kinds being modulations, gates, norms, pairs and attention.

        Counts are of sites in the source, over all instances, and of self-attention processors. The gate and the norm
        of a pair count as such too: they run alone where the pair does not apply.
        """
        classes = [
            {
                "class": name,
                "instances": max(row.forwards.total(), row.attention_found),
                **{f"{name}_fused": row.count(kind, fused=True) for name, kind in _SITES.items()},
                **{f"{name}_found": row.count(kind, fused=False) for name, kind in _SITES.items()},
                "attention_fused": row.attention_fused,
                "attention_found": row.attention_found,
                "how": row.how,
                "left_eager": row.reasons,
            }
            for name, row in self._rows.items()
        ]
        return {"classes": classes, "backends": dict(self.backends), "extension_missing": self.extension_missing}

    def __str__(self) -> str:
        """What was fused in one sentence, a table of classes without empty columns, why what is left, what runs."""
        rows = sorted(self.to_dict()["classes"], key=lambda row: row["how"] == "eager")
        kinds = [kind for kind in _KINDS if any(row[f"{kind}_found"] for row in rows)]
        totals = [
            (kind, *(sum(row[f"{kind}_{what}"] for row in rows) for what in ("fused", "found"))) for kind in kinds
        ]
        fused = [f"{fused} of {found} {_NAMES.get(kind, kind)}" for kind, fused, found in totals]
        lines = [("class", "instances", *kinds, "how")]
        for row in rows:
            counts = [f"{row[f'{k}_fused']}/{row[f'{k}_found']}" if row[f"{k}_found"] else "" for k in kinds]
            lines.append((_short(row["class"]), str(row["instances"]), *counts, row["how"]))
        left = [f"{_short(row['class'])}: {reason}" for row in rows for reason in row["left_eager"]]
        text = [f"Fused: {', '.join(fused)}.", "", *_table(lines), "", *_ways(self.backends)]
        if self.extension_missing:
            text.append(f"CUDA extension not used: {self.extension_missing}")
        return "\n".join([*text, *(["", "Left eager:"] if left else []), *(f"  {reason}" for reason in left)])


def _short(class_name: str) -> str:
    return class_name.rpartition(".")[2]


def _table(lines: list[tuple[str, ...]]) -> list[str]:
    """Columns side by side, with a rule below the head."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    rows = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
    return [rows[0], "-+-".join("-" * width for width in widths), *rows[1:]]


def _ways(backends: dict[str, str]) -> list[str]:
    """What runs the operations, those alike together."""
    ways: dict[str, list[str]] = {}
    for op, where in backends.items():
        ways.setdefault(where, []).append(op)
    if len(ways) == 1 and len(backends) > 1:
        return [f"every operation: {where}" for where in ways]
    return [f"{', '.join(ops)}: {where}" for where, ops in ways.items()]
