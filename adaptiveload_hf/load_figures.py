"""Which pictures show what limits each bucket, and how long ranks work and wait?"""

from collections.abc import Sequence

import numpy as np

from .buckets.plan import BucketPlan
from .buckets.schedule import EpochSchedule
from .buckets.shapes import LatentShape
from .figures import LIMIT, OTHER, TEXT, USED, WAITING, new_figure, tidy, to_png, token_colours

MICRO_STEPS = 50
_MOST_LANES, _MOST_BUCKETS = 16, 30
BOUND_BY = {"compute": "time", "memory": "memory", "one": "one sample", "given": "given", "samples": "its samples"}


def buckets_png(plan: BucketPlan, unit: str, memory_limit_gib: float | None) -> bytes:
    """One row a bucket: seconds and memory of its micro-batch, against the two limits; the one that binds is dark.

    Args:
        unit: of the cost model.
        memory_limit_gib: what memory was planned with, or None.

    Returns: PNG.
    """
    keep = np.unique(np.linspace(0, len(plan.buckets) - 1, _MOST_BUCKETS).round().astype(int))
    buckets = [plan.buckets[i] for i in sorted(keep, key=lambda i: plan.buckets[i].tokens)]
    has_memory = buckets[0].gib is not None
    figure = new_figure(11, 1.5 + 0.32 * len(buckets))
    axes = figure.subplots(1, 1 + has_memory, sharey=True, squeeze=False)[0]
    panels = [(axes[0], "time of a micro-batch", unit, [b.seconds for b in buckets], plan.target_seconds, "compute")]
    if has_memory:
        panels.append((axes[1], "its peak memory", "GiB", [b.gib for b in buckets], memory_limit_gib, "memory"))
    for axis, title, label, values, limit, name in panels:
        binds = [b.bound_by == name or (b.bound_by == "one" and name == "compute") for b in buckets]
        axis.barh(range(len(buckets)), values, height=0.72, color=[USED if bound else OTHER for bound in binds])
        width = 1.16 * max([*values, limit or 0])
        for row, (value, bound) in enumerate(zip(values, binds)):
            inside = value > 0.3 * width  # in a long bar, since the line of the limit is near its end
            place = {"ha": "right", "color": "white" if bound else "black"} if inside else {"color": TEXT}
            axis.text(
                value + (-0.01 if inside else 0.01) * width, row, f"{value:.3g}", va="center", fontsize=9, **place
            )
        if limit is not None:
            axis.vlines(limit, len(buckets) - 0.5, -0.5, color=LIMIT, linewidth=1.5)
            title += f" (limit {limit:.3g})"
        tidy(axis, title, "x")
        axis.tick_params(axis="y", length=0)
        axis.set_xlabel(label, color=TEXT)
        axis.set_xlim(0, width)
    rows = [("shape", "B", "limited by"), *((str(b.shape), str(b.batch_size), BOUND_BY[b.bound_by]) for b in buckets)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    labels = [f"{shape:<{widths[0]}}  {size:>{widths[1]}}  {bound:<{widths[2]}}" for shape, size, bound in rows]
    axes[0].set_yticks(range(-1, len(buckets)), labels, family="monospace")
    if any(limit is not None for *_, limit, _ in panels):
        axes[0].barh(0, 0, color=USED, label="what limits this bucket")
        axes[0].barh(0, 0, color=OTHER, label="within the limit")
        axes[0].plot([], [], color=LIMIT, label="limit")
        shown = axes[0].get_legend_handles_labels()
        figure.legend(*shown, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    axes[0].set_ylim(len(buckets) - 0.5, -1.4)
    return to_png(figure)


def ranks_png(
    schedules: dict[str, EpochSchedule], shapes: Sequence[LatentShape], tokens: list[int], unit: str
) -> bytes:
    """One lane a rank over the first micro-steps: each bar is a micro-batch, grey is waiting for the slowest rank.
    The panels hold different samples, so each says how many, and how long the whole epoch takes.

    Args:
        schedules: by title, drawn one below the other.
        shapes: of each bucket number, in the schedules' order.
        tokens: of each.
        unit: of the cost model.

    Returns: PNG.
    """
    lanes = min(_MOST_LANES, max(schedule.world_size for schedule in schedules.values()))
    figure = new_figure(12, 1.3 + len(schedules) * (0.9 + 0.2 * lanes))
    axes = figure.subplots(len(schedules), 1, squeeze=False)[:, 0]
    colours, mappable = token_colours(tokens)
    costs = [schedule.cost.reshape(-1, schedule.world_size) for schedule in schedules.values()]
    longest = max(cost[:MICRO_STEPS].max(axis=1).sum() for cost in costs)
    for axis, (title, schedule), epoch in zip(axes, schedules.items(), costs):
        cost = epoch[:MICRO_STEPS]
        _draw_lanes(axis, schedule, cost, colours)
        waiting = 1 - cost.mean() / cost.max(axis=1).mean()
        tidy(axis, f"{title}: {waiting:.0%} of the ranks' time is waiting (grey)", "x")
        axis.set_xlim(0, longest)  # the same scale for all, so that lengths can be compared
        samples = schedule.sizes[: cost.size][schedule.loss_weight[: cost.size] > 0].sum()
        words = f"predicted {unit} of the first {len(cost)} micro-steps, which hold {samples:,} samples"
        axis.set_xlabel(f"{words} (the whole epoch: {epoch.max(axis=1).sum():.4g} {unit})", color=TEXT)
    named = [[str(s) for s, t in zip(shapes, tokens) if t == length] for length in sorted(set(tokens))]
    names = ["\n".join([*same[:2], *(["..."] if len(same) > 2 else [])]) for same in named]  # one colour for them
    bar = figure.colorbar(mappable, ax=axes, aspect=35, pad=0.01)
    shown = np.unique(np.linspace(0, len(names) - 1, 12).round().astype(int))
    bar.set_ticks(shown, labels=[names[i] for i in shown])
    bar.set_label("shape of the micro-batch (latent)", color=TEXT)
    bar.ax.tick_params(labelsize=9, colors=TEXT, length=0)
    bar.outline.set_visible(False)
    return to_png(figure)


def _draw_lanes(axis, schedule, cost, colours):
    bucket = schedule.bucket.reshape(-1, schedule.world_size)[: len(cost)]
    ends = np.cumsum(cost.max(axis=1))
    starts = ends - cost.max(axis=1)
    ranks = np.unique(np.linspace(0, schedule.world_size - 1, _MOST_LANES).round().astype(int))
    for lane, rank in enumerate(ranks):
        axis.barh(lane, ends - starts, left=starts, height=0.84, color=WAITING)
        axis.barh(lane, cost[:, rank], left=starts, height=0.84, color=[colours[b] for b in bucket[:, rank]])
    axis.vlines(ends, -0.5, len(ranks) - 0.5, color="white", linewidth=0.8)
    axis.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axis.set_ylim(len(ranks) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
