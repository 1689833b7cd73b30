"""What did patch_model do to a model, and what did it leave?"""

from collections import Counter
from dataclasses import dataclass, field

from ..errors import UserError
from .first_call import Verdict
from .forwards import RewrittenForward

_SITES = {"modulations": "modulation", "gates": "gate", "norms": "norm", "pairs": "pair"}
_KINDS = (*_SITES, "attention")
_COLUMNS = ("class", "instances", *_KINDS, "how", "left eager because")


@dataclass
class _Row:
    """One class: its rewritten forwards (several if its instances hold different norms) and how often each is used;
    on how many of its instances an attention processor could be wrapped, and is."""

    forwards: Counter = field(default_factory=Counter)
    patched: Counter = field(default_factory=Counter)
    refusals: Counter = field(default_factory=Counter)
    notes: Counter = field(default_factory=Counter)
    attention_found: int = 0
    attention_fused: int = 0

    def count(self, kind: str, *, fused: bool) -> int:
        """Sites of a kind over all instances, in the source: a branch that never runs counts too."""
        instances = self.patched if fused else self.forwards
        return sum(
            number * sum(site.kind == kind and not (fused and site.reason) for site in forward.sites)
            for forward, number in instances.items()
            if not (fused and forward.verdict is Verdict.DIFFERS)
        )

    @property
    def how(self) -> str:
        verdicts = sorted({forward.verdict.value for forward in self.patched})
        ways = [f"rewritten ({', '.join(verdicts)})"] if verdicts else []
        ways += ["processor wrapped"] if self.attention_fused else []
        return ", ".join(ways) or "eager"

    @property
    def reasons(self) -> list[str]:
        reasons = dict.fromkeys([*self.notes, *self.refusals])
        for forward in self.patched:
            reasons.update((f"{site.text}: {site.reason}", None) for site in forward.sites if site.reason)
        return list(reasons)


class PatchReport:
    """What `patch_model` found, fused and left. Printed, it is a table and one line for each op.

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

    def add_attention(self, owner: type, refusal: str | None) -> None:
        """Count one self-attention of a class; `refusal` says why its processor was not wrapped."""
        row = self._rows.setdefault(f"{owner.__module__}.{owner.__qualname__}", _Row())
        row.attention_found += 1
        if refusal is None:
            row.attention_fused += 1
            self.instances_patched += 1
        else:
            row.refusals.update([refusal])

    def source(self, class_name: str) -> str:
        """The generated code of a class, named alone or with its module.

        Raises:
            UserError: no such class was patched.
        """
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
        lines = [_COLUMNS]
        for row in self.to_dict()["classes"]:
            counts = [f"{row[f'{kind}_fused']}/{row[f'{kind}_found']}" for kind in _KINDS]
            reasons = row["left_eager"] or [""]
            name = row["class"].rpartition(".")[2]
            lines.append((name, str(row["instances"]), *counts, row["how"], reasons[0]))
            lines += [(*[""] * (len(_COLUMNS) - 1), reason) for reason in reasons[1:]]
        widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS) - 1)]
        table = [" | ".join([*(cell.ljust(w) for cell, w in zip(line, widths)), line[-1]]).rstrip() for line in lines]
        table.insert(1, "-+-".join("-" * width for width in [*widths, len(_COLUMNS[-1])]))
        table += ["", *(f"{op}: {where}" for op, where in self.backends.items())]
        if self.extension_missing:
            table.append(f"CUDA extension missing: {self.extension_missing}")
        return "\n".join(table)
