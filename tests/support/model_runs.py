"""What a patched model is compared in: outputs, gradients, and the row of docs/models.md."""

import functools
import inspect
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

from adaptiveload_hf import UserError, patch_model
from adaptiveload_hf.adaln.forwards import rewritten_behind

from .model_configs import CASES, tiny_case

RELEASE = "0.42.1"  # of diffusers, that the table and the digests of tested sources are for
TABLE = Path(__file__).parents[2] / "docs" / "models.md"
_KINDS = ("modulations", "gates", "norms", "pairs", "attention")
_COLUMNS = ("model", "class", *_KINDS, "left eager because")
_HEAD = """# Which models are fused

Each transformer and ControlNet of diffusers {version} that has adaptive layer norms, with the sites that `patch_model`
fuses / finds in a tiny configuration of it ([patching.md](patching.md#what-is-replaced) says what counts as a site). A
test compares each with the unpatched model, outputs and all gradients, and checks that this table is up to date. It is
written by `PYTHONPATH=tests python -m support.model_runs`.

"""


def run(model: torch.nn.Module, inputs: dict) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """All output tensors, and the gradient of each parameter for a loss that weighs every element differently."""
    model.zero_grad()
    outputs = forward(model, inputs)
    loss = sum((o * torch.linspace(-1, 1, o.numel()).reshape(o.shape).to(o)).sum() for o in outputs if o.requires_grad)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [output.detach() for output in outputs], gradients


def forward(model: torch.nn.Module, inputs: dict) -> list[torch.Tensor]:
    """All output tensors."""
    torch.manual_seed(0)
    takes_flag = "return_dict" in inspect.signature(model.forward).parameters
    found = model(**inputs, **({"return_dict": False} if takes_flag else {}))
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def cast_inputs(inputs: dict, dtype: torch.dtype) -> dict:
    """The same in another dtype, places apart."""

    def cast(tensor):
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    kept = ("img_ids", "txt_ids", "position_ids")
    return {
        name: value if name in kept else pytree.tree_map_only(torch.Tensor, cast, value)
        for name, value in inputs.items()
    }


@functools.cache
def patched_cases() -> dict[str, tuple[list[dict] | str, dict[str, str]]]:
    """Of every case: the classes of its report, or why nothing was patched; and {class: digest of its forward}."""
    found = {}
    for name in CASES:
        model = tiny_case(name)[0]
        try:
            classes = patch_model(model, verify="never").to_dict()["classes"]  # so that top-level forwards are there
        except UserError as error:
            classes = str(error).partition(" (")[2].partition(" in ")[0]
        forwards = (rewritten_behind(getattr(vars(m).get("forward"), "__func__", None)) for m in model.modules())
        found[name] = classes, {f.name.removeprefix("diffusers.models."): f.digest for f in forwards if f is not None}
    return found


def owners_with_sites() -> dict[str, str]:
    """Class, without `diffusers.models.`, and digest of its forward, of all that is rewritten in any case."""
    return {name: digest for _, digests in patched_cases().values() for name, digest in digests.items()}


def table() -> str:
    """The text of docs/models.md."""
    lines = [_HEAD.format(version=RELEASE), _line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    return "".join([*lines, *map(_line, _rows())])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _rows() -> list[tuple[str, ...]]:
    rows = []
    for name, (class_name, _, _) in CASES.items():
        classes = patched_cases()[name][0]
        if isinstance(classes, str):
            rows.append((name, class_name, *["0/0"] * len(_KINDS), classes))
            continue
        counts = [
            f"{sum(row[f'{kind}_fused'] for row in classes)}/{sum(row[f'{kind}_found'] for row in classes)}"
            for kind in _KINDS
        ]
        reasons = [f"{row['class'].rpartition('.')[2]}: {reason}" for row in classes for reason in row["left_eager"]]
        rows.append((name, class_name, *counts, "<br>".join(dict.fromkeys(reasons))))
    return rows


if __name__ == "__main__":
    TABLE.write_text(table())
