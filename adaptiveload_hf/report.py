"""How does a run look: cost fit, plan, load of the ranks before and after, loss? One HTML file without scripts."""

import base64
import json
import math
from html import escape
from pathlib import Path

from .buckets.schedule import schedule_epoch
from .buckets.shapes import shape_counts
from .buckets.simulate import simulate
from .errors import UserError
from .figures import fit_png, load_png, loss_png, require_matplotlib

METRICS_FILE = "metrics.jsonl"
_TITLE = "adaptiveload: cost, plan, load and loss"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { border-bottom: 1px solid #ddd; padding: .25em .9em; text-align: right; }
th:first-child, td:first-child { text-align: left; }
th { border-bottom: 2px solid #888; }
img { max-width: 100%; }
.problems { color: #a33; }
"""


def write_report(output, config, index, *, world_size, gradient_accumulation_steps, run=None):
    """
    Write the report.

    Args:
        output: path of the HTML file; its folder is made if missing.
        config: `BucketConfig`.
        index: `BucketIndex` of the dataset.
        world_size: data ranks W.
        gradient_accumulation_steps: K.
        run: folder with `metrics.jsonl`, or None.

    Returns: problems of the run's metrics, each named by its line; the rest was used. list[str].

    Raises:
        UserError: matplotlib is missing, or the run has no metrics.
    """
    require_matplotlib()
    records, problems = ([], []) if run is None else read_metrics(Path(run) / METRICS_FILE)
    counts = shape_counts(index)
    ranks = {"world_size": world_size, "gradient_accumulation_steps": gradient_accumulation_steps}
    plan = config.plan(counts, **ranks)
    usual = config.plan(counts, policy="fixed" if config.batch_sizes else "equal_token", **ranks)
    before = schedule_epoch(index.bucket_of_sample, usual, config.cost_model, balance="none", **ranks)
    after = schedule_epoch(index.bucket_of_sample, plan, config.cost_model, balance="auto", **ranks)
    sizes = "batch sizes in use" if config.batch_sizes else "equal tokens in each batch"
    schedules = {
        f"before: {sizes}, dealt at random": before,
        f"after: planned batch sizes, dealt by cost ({after.balance})": after,
    }
    parts = [
        f"<p>{_sentence(config, counts, **ranks)}</p>",
        "<h2>What a step costs</h2>" + _cost(config),
        "<h2>Batch size of each bucket</h2>" + _plan_table(plan, config.cost_model.unit),
        "".join(f"<p>{escape(finding)}</p>" for finding in plan.findings),
        "<h2>Load of the ranks</h2>" + _load(schedules, index.shapes, config.cost_model.unit),
        "<h2>Loss</h2>" + _loss(records, problems, run),
    ]
    page = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_TITLE}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{_TITLE}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page, encoding="utf-8", errors="backslashreplace")
    return problems


def read_metrics(path):
    """
    Read the metrics of a run, the last record of each step where a resumed run repeated some.

    Args:
        path: `metrics.jsonl`.

    Returns: (records sorted by step, list[dict]; problems, list[str], one for each line left out).

    Raises:
        UserError: no such file, or nothing usable in it.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path.parent} holds no {path.name}. Give the --output_dir of a training run that has begun.")
    records, problems = {}, []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        problem = _unusable(line)
        if problem:
            problems.append(f"{path.name} line {number} is left out: {problem}")
        else:
            record = json.loads(line)
            records[record["step"]] = record
    if not records:
        raise UserError(f"{path} holds no usable line. " + " ".join(problems[:3]))
    return [records[step] for step in sorted(records)], problems


def _unusable(line):
    """Why this line gives no point of the loss curve, or None."""
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return "it is no whole JSON"
    if not isinstance(record, dict):
        return "it is no JSON object"
    for name in ("step", "loss"):
        value = record.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"{name} is {value!r}, not a finite number"
    return None


def _sentence(config, counts, world_size, gradient_accumulation_steps):
    model, gpu = config.model.get("class", "the model"), config.environment.get("gpu") or "CPU"
    origin = f"measured on {gpu}" if config.measurements else "counted from its config, not measured"
    return escape(
        f"{sum(counts.values())} samples in {len(counts)} shapes, planned for {world_size} ranks and "
        f"{gradient_accumulation_steps} micro-steps in an optimizer step; {model} {origin}."
    )


def _cost(config):
    if not config.measurements:
        law = config.cost_model
        return (
            f"<p>B * ({law.c0:.4g} + {law.c1:.4g} S + {law.c2:.4g} S<sup>2</sup>) teraflop: {law.unit}, no time.</p>"
        )
    picture = fit_png(config.measurements, config.cost_model, config.power_law)
    words = "Each point is one measured pair of shape and batch size B; S is the number of tokens of one sample."
    return _image(picture, "measured seconds and fitted laws") + f"\n<p>{words}</p>"


def _plan_table(plan, unit):
    header = ("shape (latent)", "pixels", "tokens S", "samples", "batch size B", unit, "GiB", "bound by")
    rows = [
        (
            bucket.shape,
            bucket.shape.pixels(),
            f"{bucket.tokens:,}",
            f"{bucket.count:,}",
            bucket.batch_size,
            f"{bucket.seconds:.4g}",
            "" if bucket.gib is None else f"{bucket.gib:.3g}",
            bucket.bound_by,
        )
        for bucket in plan.buckets
    ]
    return _table(header, rows)


def _load(schedules, shapes, unit):
    rows, titled = [], {}
    for title, schedule in schedules.items():
        run = simulate(schedule)
        rows.append(
            (
                title,
                f"{run.epoch_seconds:.4g}",
                f"{run.balance_efficiency:.1%}",
                f"{run.step_cv:.3f}",
                *((f"{run.samples_per_second:.4g}", f"{run.tokens_per_second:,.0f}") if unit == "seconds" else ()),
            )
        )
        efficiency = f"{run.balance_efficiency:.0%} of the ranks' time is work"
        titled[f"{title}\nepoch {run.epoch_seconds:.4g} {unit}, {efficiency}"] = schedule
    header = ("schedule", f"epoch {unit}", "balance efficiency", "step CV")
    header += ("samples/s", "tokens/s") if unit == "seconds" else ()
    words = (
        "Predicted for one epoch of the same samples. A bar is one micro-batch; grey is a rank that "
        "waits for the slowest one of its micro-step. A long epoch is shown by its first micro-steps, many ranks by "
        "some of them."
    )
    return (
        _table(header, rows)
        + f"<p>{words}</p>"
        + _image(load_png(titled, shapes, unit), "work and waiting of each rank")
    )


def _loss(records, problems, run):
    if run is None:
        return "<p>No run was given.</p>"
    listed = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    steps, losses = [record["step"] for record in records], [record["loss"] for record in records]
    facts = f"<p>{len(records)} optimizer steps of {escape(Path(run).resolve().name)}.</p>"
    return (
        facts
        + _image(loss_png(steps, losses), "loss by optimizer step")
        + (f'<ul class="problems">{listed}</ul>' if listed else "")
    )


def _table(header, rows):
    head = "".join(f"<th>{escape(str(cell))}</th>" for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"


def _image(png, alt):
    return f'<p><img alt="{escape(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}"></p>'
