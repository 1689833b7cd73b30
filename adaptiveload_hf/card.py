"""What does a bucket config's page on the Hub say?"""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from .figures import can_draw
from .fit_figures import fit_png
from .hub import is_hub_id

CARD_FILE, PICTURE_FILE = "README.md", "fit.png"
LIBRARY = "adaptiveload_hf"  # which each card names
TAGS = ["adaptiveload", "bucket-config", "video-diffusion"]
_TURNS = "`adaptiveload_hf` turns it into batch sizes for your own clips, number of GPUs and gradient accumulation."
# By the config's origin: what the numbers are, the heading over the set-up, the heading over the measurements.
_ORIGINS = {
    "benchmark": (
        "What one training step of this model costs, measured with the set-up below, and the law fitted to it. "
        + _TURNS,
        "Measured with",
        "Measurements",
    ),
    "training_log": (
        "What one training step of this model costs, fitted to the optimizer steps of a training run with the set-up "
        "below. No benchmark was run, and the log has no memory. " + _TURNS,
        "Trained with",
        "Each micro-batch's share of the run's steps",
    ),
    "counted": (
        "What a training step of this model costs, counted from its config: relative cost (teraflop), not seconds. "
        "Nothing was measured. `adaptiveload_hf` balances ranks with it.",
        "Counted for",
        None,
    ),
}


def write_card(config: Any, folder: Path, repo_id: str | None) -> list[str]:
    """Write the card, and its picture where matplotlib is installed.

    Args:
        config: the `BucketConfig`.
        repo_id: Hub id for the example, or None.

    Returns: names of the files written.
    """
    files = [CARD_FILE]
    if config.measurements and can_draw():
        laws = {"power_law": config.power_law, config.cost_model.kind: config.cost_model}
        (folder / PICTURE_FILE).write_bytes(fit_png(config.measurements, laws, config.cost_model.kind))
        files.append(PICTURE_FILE)
    card = _card(config, repo_id, PICTURE_FILE in files)
    (folder / CARD_FILE).write_text(card, encoding="utf-8", errors="backslashreplace")  # json can name half characters
    return files


def _card(config, repo_id, has_picture):
    base_model = config.model.get("base_model")
    base_model = base_model if is_hub_id(base_model) else None  # the Hub refuses a card that names a path
    front_matter = ModelCardData(library_name=LIBRARY, tags=TAGS, base_model=base_model).to_yaml()
    words, set_up, measured = _ORIGINS[config.origin]
    parts = [
        f"---\n{front_matter}\n---",
        f"# Bucket config: {_cell(config.model.get('class', 'a diffusion transformer'))}",
        words,
        _use(repo_id),
        f"## {set_up}\n\n" + _table(("", ""), _facts(config)),
        "## Cost law\n\n" + _table(("form", "parameters", "median error", "largest error"), _laws(config)),
    ]
    if config.memory_model is not None:
        memory = config.memory_model
        line = f"{memory.base_gib:.4g} GiB + {memory.gib_per_token:.4g} GiB for each token of B*S"
        line += f" + {memory.gib_per_sample:.4g} GiB for each sample" if memory.gib_per_sample else ""
        floor = f"{memory.floor_gib:.4g} GiB"
        floor += f" + {memory.floor_gib_per_token:.4g} GiB for each token" if memory.floor_gib_per_token else ""
        beyond = "" if memory.known_tokens is None else f" Not known beyond B*S = {memory.known_tokens}."
        parts.append(f"Memory: {line}, at least {floor}.{beyond}")
    if has_picture:
        parts.append(f"![measured seconds, fitted laws and their errors]({PICTURE_FILE})")
    if config.measurements:
        header = ("shape", "tokens S", "batch size B", "seconds", "peak GiB")
        parts.append(f"## {measured}\n\n" + _table(header, _measurements(config)))
    if config.batch_sizes:
        rows = ((shape, config.geometry.tokens(shape), size) for shape, size in sorted(config.batch_sizes.items()))
        parts.append("## Batch sizes in use\n\n" + _table(("shape", "tokens S", "batch size B"), rows))
    if config.example_plan is not None:
        parts.append(_example(config.example_plan, config.cost_model.unit))
    return "\n\n".join(parts) + "\n"


def _use(repo_id):
    return (
        "```python\n"
        "from adaptiveload_hf import BucketConfig, BucketDataLoader\n\n"
        f'config = BucketConfig.from_pretrained("{repo_id or "this folder"}")\n'
        "loader = BucketDataLoader(dataset, config, accelerator=accelerator)\n"
        "```"
    )


def _facts(config):
    """Sorted by name, as the JSON is, so that a loaded config writes the same card."""
    facts = {key: value for key, value in config.model.items() if key in ("class", "config_hash")}
    if is_hub_id(config.model.get("base_model")):
        facts["base_model"] = config.model["base_model"]
    facts |= {"patch size": "x".join(map(str, config.geometry.patch_size)), "text tokens": config.geometry.text_tokens}
    for key, value in sorted({**config.environment, **facts}.items()):
        if isinstance(value, dict):
            value = ", ".join(f"{name} {item}" for name, item in sorted(value.items()))
        yield key.replace("_", " "), value


def _laws(config):
    rows = [(f"**{config.cost_model.kind}** (used)", config.cost_model, config.config["cost_model"].get("errors"))]
    if config.power_law is not None and config.cost_model.kind != "power_law":
        label = "power_law (the paper's a + b\\*B\\*S^p)"
        rows.append((label, config.power_law, config.config["power_law"]["errors"]))
    for label, law, errors in rows:
        parameters = ", ".join(f"{name} {value:.4g}" for name, value in law.parameters.items())
        yield label, parameters, *(_percent(errors[name]) if errors else "not measured" for name in ("median", "max"))


def _measurements(config):
    for m in config.measurements:
        yield m.shape, m.tokens, m.batch_size, "out of memory" if m.oom else f"{m.seconds:.4g}", _gib(m.peak_gib)


def _gib(gib):
    return f"{gib:.4g}" if gib else "not measured"


def _example(plan, unit):
    rows = [
        (
            b.shape,
            b.tokens,
            b.count,
            b.batch_size,
            f"{b.seconds:.4g}",
            "" if b.gib is None else f"{b.gib:.4g}",
            b.bound_by,
        )
        for b in plan.buckets
    ]
    header = ("shape", "tokens", "samples", "batch size", unit, "GiB", "bound by")
    return (
        f"## Example: the plan for the author's own data\n\nMade for balance `{plan.balance}`. "
        "Yours is computed from your data when you load the config.\n\n" + _table(header, rows)
    )


def _table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value):
    """One line without what Markdown or HTML would act on."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")


def _percent(error):
    return f"{100 * error:.2g}%"
