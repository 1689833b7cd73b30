"""How do cost, plan, load of the ranks and a run look? One HTML page without scripts, and its pictures as PNGs."""

import base64
import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from .buckets.fit import fit_cost_model
from .buckets.schedule import schedule_epoch
from .buckets.shapes import LatentShape
from .buckets.simulate import simulate
from .environment import memory_limit
from .errors import UserError
from .figures import require_matplotlib
from .fit_figures import errors_png, fit_png
from .load_figures import BOUND_BY, MICRO_STEPS, buckets_png, ranks_png
from .run_figures import run_png

METRICS_FILE = "metrics.jsonl"
_MOST_FINDINGS = 10
_LARGEST = 1e12  # of a curve that can be drawn
_TITLE = "What training on this dataset costs"
_STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { font-size: 1.7em; margin-bottom: .2em; }
h2 { font-size: 1.25em; margin: 2.2em 0 .4em; }
p, dl { max-width: 50em; }
.facts { display: flex; flex-wrap: wrap; gap: 1em; margin: 1.4em 0; }
.facts div { background: #f3f6f9; border-radius: .5em; padding: .8em 1.2em; min-width: 11em; }
.facts b { display: block; font-size: 1.55em; color: #0072b2; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: .25em .9em; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { border-bottom: 2px solid #888; vertical-align: bottom; }
figure { margin: 1em 0; }
img { max-width: 100%; }
dt { font-weight: 600; } dd { margin: 0 0 .5em 1.5em; }
.problems { color: #a33; }
"""
_WORDS = {
    "shape": "size of one sample's latent, frames x height x width; the pixels that it stands for are beside it",
    "tokens, S": "length of the transformer's sequence for one sample",
    "bucket": "all samples of one shape; a batch comes from one bucket",
    "micro-batch, B": "B samples of one bucket on one rank (usually one GPU): one forward and backward",
    "micro-step": "the micro-batches that all ranks run at the same time; they wait for the slowest",
    "optimizer step": "the micro-steps after which the weights change",
}


def write_report(
    output: str | Path,
    config: Any,
    shape_counts: Mapping[LatentShape, int],
    *,
    world_size: int,
    gradient_accumulation_steps: int,
    run: str | Path | None = None,
    vae_scale: tuple[int, int] | None = None,
    **options: Any,
) -> tuple[list[Path], list[str]]:
    """Write the page, and its pictures into a folder beside it.

    Args:
        output: path of the HTML file; its folder is made if missing. `report.html` has `report_pictures/*.png`.
        config: `BucketConfig`.
        shape_counts: samples of each shape.
        world_size: data ranks W.
        gradient_accumulation_steps: K.
        run: folder with `metrics.jsonl`, or None.
        vae_scale: frames and pixels that one latent stands for; None: not known, and no pixels are shown.
        options: further arguments of `config.plan`.

    Returns: (the files written, the page first; problems of the run's metrics, each named by its line).

    Raises:
        UserError: matplotlib is missing, the run has no metrics, or `output` is a folder.
    """
    require_matplotlib()
    records, problems = ([], []) if run is None else read_metrics(Path(run) / METRICS_FILE)
    output = Path(output)
    if output.is_dir():
        raise UserError(f"The page is one file, but {output} is a folder. Give a name in it, such as report.html.")
    pictures = output.with_name(f"{output.stem}_pictures")
    pictures.mkdir(parents=True, exist_ok=True)

    written = [output]

    def picture(name, png, alt):
        written.append(pictures / f"{name}.png")
        written[-1].write_bytes(png)
        return (
            f'<figure><img alt="{escape(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}"></figure>'
        )

    ranks = {"world_size": world_size, "gradient_accumulation_steps": gradient_accumulation_steps}
    plan, schedules = _before_and_after(config, shape_counts, ranks, options)
    unit = config.cost_model.unit
    parts = [
        f"<p>{_sentence(config, shape_counts, **ranks)}</p>",
        _facts(*map(simulate, schedules.values()), unit),
        *_load(picture, plan, schedules, unit),
        *_plan(picture, plan, config, options.get("memory_limit_gib"), unit, vae_scale),
        *_cost(picture, config),
        *_run(picture, records, problems, run),
        "<h2>Words</h2>\n<dl>" + "".join(f"<dt>{w}</dt><dd>{m}</dd>" for w, m in _WORDS.items()) + "</dl>",
    ]
    page = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_TITLE}</title>\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{_TITLE}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )
    output.write_text(page, encoding="utf-8", errors="backslashreplace")
    return written, problems


def read_metrics(path: str | Path) -> tuple[list[dict], list[str]]:
    """Read the metrics of a run, the last record of each step where a resumed run repeated some.

    Args:
        path: `metrics.jsonl`.

    Returns: (records sorted by step, one problem for each line left out).

    Raises:
        UserError: no such file, or nothing usable in it.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path.parent} holds no {path.name}. Give the --output_dir of a training run that has begun.")
    records, problems = {}, []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = _read_record(line)
                records[record["step"]] = record
            except UserError as error:
                problems.append(f"{path.name} line {number} is left out: {error}")
    if not records:
        raise UserError(f"{path} holds no usable line. " + " ".join(problems[:3]))
    return [records[step] for step in sorted(records)], problems


def _read_record(line):
    """A step's line without its micro-batches, which are most of it and in no picture.

    Raises:
        UserError: why it gives no point of the loss curve.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError("it is no whole JSON") from None
    if not isinstance(record, dict):
        raise UserError("it is no JSON object")
    for name in ("step", "loss"):
        value = record.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
            raise UserError(f"{name} is {value!r}, not a finite number below {_LARGEST:g}")
    record.pop("micro_batches", None)
    return record


def _before_and_after(config, shape_counts, ranks, options):
    """(plan, {title: schedule}): without this package, and with it."""
    plan = config.plan(shape_counts, **ranks, **options)
    own = bool(config.batch_sizes)
    usual = {name: value for name, value in options.items() if name not in ("samples_per_step", "target_seconds")}
    before = config.plan(shape_counts, policy="fixed" if own else "equal_token", **ranks, **usual)
    buckets = np.repeat(np.arange(len(plan.buckets)), [bucket.count for bucket in plan.buckets])
    cost = config.cost_model
    sizes = "the batch sizes in use" if own else "equal tokens in each batch"
    titles = (
        f"Before: {sizes}, random order",
        f"After: {'the same' if own else 'planned'} batch sizes, balanced by cost",
    )
    return plan, {
        titles[0]: schedule_epoch(buckets, before, cost, balance="none", **ranks),
        titles[1]: schedule_epoch(buckets, plan, cost, balance="auto", **ranks),
    }


def _sentence(config, counts, world_size, gradient_accumulation_steps):
    model = config.model.get("class", "the model")
    # A benchmark without a GPU says so with None; without the key nobody knows what was measured on.
    hardware = f" on {config.environment['gpu'] or 'CPU'}" if "gpu" in config.environment else ""
    origin = {"benchmark": f"measured{hardware}", "training_log": f"learnt from a run{hardware}"}.get(
        config.origin, "counted from its config, not measured"
    )
    return escape(
        f"{sum(counts.values()):,} samples, {_counted(len(counts), 'shape')}, planned for "
        f"{_counted(world_size, 'rank')} and {_counted(gradient_accumulation_steps, 'micro-step')} in an optimizer "
        f"step; {model} {origin}. All times are predictions for one epoch of the same samples."
    )


def _counted(number, word):
    return f"{number} {word}{'s' * (number != 1)}"


def _facts(before, after, unit):
    """The four numbers that a reader takes along."""
    waiting = [f"{1 - found.balance_efficiency:.0%}" for found in (before, after)]
    epoch = [_amount(found.epoch_seconds, unit) for found in (before, after)]
    samples = [f"{found.samples_per_update_step:,.0f}" for found in (before, after)]
    facts = {
        f"{before.epoch_seconds / after.epoch_seconds:.2f}x": "the speed of before",
        " to ".join(waiting): "of the ranks' time is waiting",
        " to ".join(epoch): f"for one epoch{'' if unit == 'seconds' else ', ' + unit}",
        " to ".join(samples): "samples in an optimizer step",
    }
    cells = (f"<div><b>{value}</b>{words}</div>" for value, words in facts.items())
    return f'<div class="facts">{"".join(cells)}</div>'


def _amount(cost, unit):
    """2 h 5 min, or the number with its unit."""
    if unit != "seconds":
        return f"{cost:,.0f}" if cost >= 100 else f"{cost:.3g}"
    if cost < 100:
        return f"{cost:.3g} s"
    minutes = round(cost / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _load(picture, plan, schedules, unit):
    yield "<h2>Who waits for whom</h2>"
    yield (
        "<p>Each lane is one rank. A bar is one micro-batch, its colour the shape of its samples. Ranks meet at the "
        "end of each micro-step (white line); a rank that finishes early waits (grey). "
        f"Panels that stop after {MICRO_STEPS} micro-steps hold different samples: the table below compares the "
        "whole epochs, whose samples are the same.</p>"
    )
    tokens = [bucket.tokens for bucket in plan.buckets]
    yield picture("ranks", ranks_png(schedules, plan.shapes, tokens, unit), "work and waiting of each rank")
    header = ["schedule of one epoch", f"epoch {unit}", "balance efficiency", "step CV"]
    header += ["samples/s", "tokens/s"] if unit == "seconds" else []
    rows = []
    for title, schedule in schedules.items():
        found = simulate(schedule)
        row = [title, f"{found.epoch_seconds:.4g}", f"{found.balance_efficiency:.1%}", f"{found.step_cv:.3f}"]
        row += [f"{found.samples_per_second:.4g}", f"{found.tokens_per_second:,.0f}"] if unit == "seconds" else []
        rows.append(row)
    yield _table(header, rows)
    yield (
        "<p>Balance efficiency is the share of the ranks' time that is work; step CV is how much the ranks' costs "
        "differ within a micro-step (std / mean).</p>"
    )


def _plan(picture, plan, config, memory_limit_gib, unit, vae_scale):
    yield "<h2>Batch size of each bucket, and what limits it</h2>"
    if memory_limit_gib is None and config.memory_model is not None:
        memory_limit_gib, _ = memory_limit(config.environment)
    limits = "time and memory" if plan.buckets[0].gib is not None else "time"
    words = f"B grows until {limits} of the micro-batch would pass a limit. The dark bar is what stopped it."
    yield f"<p>{'These batch sizes are in use already.' if plan.policy == 'fixed' else words}</p>"
    yield picture("buckets", buckets_png(plan, unit, memory_limit_gib), "time and memory of each bucket's micro-batch")
    header = ("shape (latent)", "pixels", "tokens S", "samples", "batch size B", unit, "GiB", "limited by")
    rows = [
        (
            bucket.shape,
            "-" if vae_scale is None else bucket.shape.pixels(*vae_scale),
            f"{bucket.tokens:,}",
            f"{bucket.count:,}",
            bucket.batch_size,
            f"{bucket.seconds:.4g}",
            "" if bucket.gib is None else f"{bucket.gib:.3g}",
            BOUND_BY[bucket.bound_by],
        )
        for bucket in plan.buckets
    ]
    yield _table(header, rows)
    yield "<ul>" + "".join(f"<li>{escape(finding)}</li>" for finding in plan.findings) + "</ul>"


def _cost(picture, config):
    yield "<h2>How well the cost is known</h2>"
    if config.origin == "counted":
        law = config.cost_model
        yield f"<p>B * ({law.c0:.4g} + {law.c1:.4g} S + {law.c2:.4g} S<sup>2</sup>) teraflop: {law.unit}, no time.</p>"
        return
    used = config.cost_model.kind
    laws = {"power_law": config.power_law}
    if config.origin == "benchmark":
        laws |= {kind: found.model for kind, found in fit_cost_model(config.measurements).candidates.items()}
        words = "Training steps were timed for some shapes and batch sizes, and laws fitted to them."
    else:
        words = "Laws were fitted to the optimizer steps of a training run. A point is a micro-batch's share of them."
    laws |= {"power_law": config.power_law, used: config.cost_model}
    yield (
        f"<p>{words} A point on the diagonal is predicted exactly. Plans are made with the law marked as used: the "
        "one that best predicts shapes it has not seen.</p>"
    )
    yield picture("fit", fit_png(config.measurements, laws, used), "measured against predicted seconds of each law")
    yield picture("errors", errors_png(config.measurements, laws, used), "error of each law by shape")


def _run(picture, records, problems, run):
    if run is None:
        return
    yield "<h2>The run so far</h2>"
    name = escape(Path(run).resolve().name)
    yield f"<p>{len(records)} optimizer steps of {name}, the last is {records[-1]['step']}.</p>"
    yield picture("run", run_png(records), "loss, seconds, throughput and balance by optimizer step")
    said = [(record["step"], words) for record in records for words in record.get("findings") or ()]
    if said:
        listed = "".join(f"<li>step {step}: {escape(str(words))}</li>" for step, words in said[-_MOST_FINDINGS:])
        yield f"<p>The run's latest findings:</p><ul>{listed}</ul>"
    if problems:
        yield '<ul class="problems">' + "".join(f"<li>{escape(problem)}</li>" for problem in problems) + "</ul>"


def _table(header, rows):
    head = "".join(f"<th>{escape(str(cell))}</th>" for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'
