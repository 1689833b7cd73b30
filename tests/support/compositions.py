"""What tests of compositions share: which fused ops ran, whether gradients agree, and the matrix of docs/patching.md.

Each test records its cells. They must be those of the docs, or `pytest --write-matrix` puts them there.
"""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adaptiveload_hf import patch_model

from .tiny_models import relative_error, tiny_inputs, tiny_model

BOTH = pytest.mark.parametrize("family", ["wan", "sd35"])
ORDERS = pytest.mark.parametrize("patch_first", [True, False], ids=["patch first", "patch last"])
DOCS = Path(__file__).parents[2] / "docs" / "patching.md"
COLUMNS = ("Wan, patched first", "Wan, patched last", "Wan's attention", "SD3.5, patched first", "SD3.5, patched last")
ROWS = (
    "torch.compile of the model, full graph",
    "compile_repeated_blocks",
    "gradient checkpointing",
    "gradient checkpointing, reentrant",
    "gradient checkpointing, autocast",
    "gradient checkpointing, reentrant, autocast",
    "selective checkpointing that keeps matrix products",
    "selective checkpointing that keeps fused ops",
    "LoRA, also on the modulation's linears",
    "LoRA switched off",
    "LoRA merged into the weights",
    "LoRA saved and loaded",
    "PEFT's get_peft_model",
    "saved tensors on the CPU",
    "torch.func.grad",
    "torch.export",
    "fused projections",
    "DDP",
    "FSDP1, gradient checkpointing",
    "FSDP2",
    "FSDP2, gradient checkpointing",
    "FSDP2 bf16 by make_accelerator, gradient checkpointing",
    "FSDP2 bf16 by make_accelerator, accelerate's activation checkpointing",
    "FSDP2 bf16 that casts inputs, gradient checkpointing",
    "FSDP2, LoRA",
    "copy.deepcopy",
    "EMAModel",
    "torch.save of the model",
    "save_pretrained, from_pretrained",
    "layerwise fp8 casting",
    "group offload of blocks",
    "group offload of leaves",
    "accelerate.cpu_offload",
    "FirstBlockCache",
    "MagCache",
    "pipeline with one or two transformers",
)
_BEGIN = "<!-- The matrix, written by `pytest tests/adaln --write-matrix`. -->\n"
_END = "<!-- End of the matrix. -->\n"


def composed(family: str, compose, patch_first: bool | None) -> torch.nn.Module:
    """A tiny model patched before or after `compose(model)`, which may return another one; None: not patched."""
    model = tiny_model(family)
    if patch_first:
        patch_model(model)
    replaced = compose(model)
    model = model if replaced is None else replaced
    if patch_first is False:
        patch_model(model)
    return model


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "adaptiveload":
            self.ops[func.name().partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def fused_ops(function, *args, **kwargs) -> tuple[object, Counter]:
    """What a call returns, and how often it ran each fused op."""
    with _Recorder() as recorder:
        result = function(*args, **kwargs)
    return result, recorder.ops


def column_of(family: str, patch_first: bool) -> str:
    """The column of a family and an order."""
    return f"{'Wan' if family == 'wan' else 'SD3.5'}, patched {'first' if patch_first else 'last'}"


def cells_of(family: str, patch_first: bool, found: Counter, plain: Counter) -> dict[str, str]:
    """The cells of a run in which the ops `found` ran, where a patched model by itself runs those of `plain`."""
    if family != "wan":
        return {column_of(family, patch_first): _share(found, plain, "eager")}
    (turned, others), (plain_turned, plain_others) = map(_apart, (found, plain))
    cells = {"Wan's attention": _share(turned, plain_turned, "stock")}
    return cells | {column_of(family, patch_first): _share(others, plain_others, "eager")}


def same_refusal(family: str, patch_first: bool, compose_and_run) -> dict[str, str]:
    """The cell of what does not work for a family: unpatched and patched raise the same."""
    errors = []
    for order in (None, patch_first):
        with pytest.raises(Exception) as caught:
            compose_and_run(order)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]
    return {column_of(family, patch_first): "fails unpatched too"}


def _apart(ops: dict[str, int]) -> tuple[dict, dict]:
    """The ops of Wan's attention, which are those with an RMS norm, and the others."""
    turned = {op: count for op, count in ops.items() if "rms" in op}
    return turned, {op: count for op, count in ops.items() if op not in turned}


def _share(found: dict, plain: dict, none: str) -> str:
    return none if not found else "all" if found == plain else "part"


def run_and_count(model: torch.nn.Module, inputs: dict) -> tuple[torch.Tensor, dict[str, torch.Tensor], Counter]:
    """Output, gradients by name (wrappers' prefixes left out), and the fused ops that the forward ran."""
    model.zero_grad()
    (output,), ops = fused_ops(model, **inputs, return_dict=False)
    weights = torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(output)
    (output * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return output.detach(), {plain_name(name): gradient.clone() for name, gradient in gradients.items()}, ops


def plain_name(name: str) -> str:
    """A parameter's name without what compile, DDP and PEFT put before it."""
    for prefix in ("_orig_mod.", "module.", "base_model.model."):
        name = name.removeprefix(prefix)
    return name


def largest_error(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """The largest relative error of a gradient, but for those that are nothing but rounding (biases of keys)."""
    assert found.keys() == truth.keys()
    floor = 1e-6 * max(gradient.norm() for gradient in truth.values())
    return max(relative_error(found[name], truth[name]) for name in truth if truth[name].norm() > floor)


def plain_ops(family: str, **autocast) -> Counter:
    """The fused ops of one forward of a patched model by itself."""
    model = tiny_model(family)
    patch_model(model)
    with torch.autocast("cpu", **{"enabled": False, **autocast}):
        return fused_ops(model, **tiny_inputs(family))[1]


# --------------------------------------------------------------------------------------------- the matrix


def documented() -> dict[str, dict[str, str]]:
    """Row -> column -> cell, as the docs have it."""
    table = DOCS.read_text().partition(_BEGIN)[2].partition(_END)[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {row: dict(zip(lines[0][1:], cells, strict=True)) for row, *cells in lines[2:]}


def write_matrix(recorded: dict[str, dict[str, str]]) -> None:
    """Put recorded cells into the docs; those of rows that no test ran this time stay."""
    before = documented()
    rows = {row: {**before.get(row, {}), **recorded.get(row, {})} for row in ROWS}
    lines = [("", *COLUMNS), ("---",) * (1 + len(COLUMNS))]
    lines += [(row, *(cells.get(column, "not run") for column in COLUMNS)) for row, cells in rows.items()]
    table = "".join("|" + "|".join(f" {cell} ".replace("  ", " ") for cell in line) + "|\n" for line in lines)
    head, _, rest = DOCS.read_text().partition(_BEGIN)
    DOCS.write_text(head + _BEGIN + table + _END + rest.partition(_END)[2])
