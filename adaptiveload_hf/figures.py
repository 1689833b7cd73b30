"""Which pictures show a cost fit, the load of the ranks and a loss curve? Matplotlib is imported only when drawing."""

import importlib.util
import io

import numpy as np

from .errors import UserError

_WAITING = "0.7"
_MOST_LANES, _MOST_MICRO_STEPS, _MOST_LEGEND_LINES = 16, 60, 14


def can_draw():
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib():
    """
    Raises:
        UserError: matplotlib is not installed.
    """
    if not can_draw():
        raise UserError(
            "Pictures need matplotlib, which is not installed. Install it: pip install adaptiveload_hf[recipes]"
        )


def fit_png(measurements, cost_model, power_law):
    """
    Left: measured seconds against tokens of the micro-batch, with both laws. Right: what each law misses by.

    Args:
        measurements: list of `Measurement`; those that ran out of memory are left out.
        cost_model: the chosen `CostModel`.
        power_law: the paper's form, fitted to the same measurements.

    Returns: PNG, bytes.
    """
    measured = [m for m in measurements if not m.oom]
    shapes = [shape for _, shape in sorted({(m.tokens, m.shape) for m in measured})]
    colours = _colours(len(shapes))
    figure = _figure(11, 4.6)
    law, error = figure.subplots(1, 2, width_ratios=(3, 2))
    for shape, colour in zip(shapes, colours):
        _draw_shape(law, [m for m in measured if m.shape == shape], cost_model, power_law, shape, colour)
    law.plot([], [], color="0.3", label=f"fitted: {cost_model.kind}")
    law.plot([], [], color="0.3", linestyle=":", label="paper's a + b*B*S^p")
    law.set(xscale="log", yscale="log", xlabel="tokens of the micro-batch, B*S", ylabel="seconds of the micro-batch")
    law.yaxis.set_major_formatter(_plain_log())
    law.yaxis.set_minor_formatter(_plain_log())
    law.set_title("Measured seconds and the fitted law")
    law.grid(alpha=0.3, which="both")
    _legend(law, "shape (latent F x H x W)")

    order = np.argsort([m.batch_size * m.tokens for m in measured], kind="stable")
    for model, label, colour, shift in (
        (power_law, "paper's a + b*B*S^p", "tab:orange", -0.2),
        (cost_model, f"fitted: {cost_model.kind}", "tab:blue", 0.2),
    ):
        missed = [100 * _relative_error(model, measured[i]) for i in order]
        error.barh(np.arange(len(order)) + shift, missed, height=0.4, label=label, color=colour)
    error.set_yticks(np.arange(len(order)), [f"{measured[i].shape}  B={measured[i].batch_size}" for i in order])
    error.tick_params(axis="y", labelsize=max(4, min(8, 200 / len(order))))
    error.axvline(0, color="0.3", linewidth=0.8)
    error.set(xlabel="predicted - measured, % of measured")
    error.set_title("Error of each law")
    error.grid(alpha=0.3, axis="x")
    error.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    return _png(figure)


def load_png(schedules, shapes, unit):
    """
    One lane a rank: each bar is a micro-batch, grey is waiting for the slowest rank of the micro-step.

    Args:
        schedules: dict of title -> `EpochSchedule`, drawn one below the other on the same axis of cost.
        shapes: `LatentShape` of each bucket number, in the schedules' order.
        unit: of the cost model.

    Returns: PNG, bytes.
    """
    lanes = min(_MOST_LANES, max(schedule.world_size for schedule in schedules.values()))
    figure = _figure(11, 0.6 + len(schedules) * (1.1 + 0.22 * lanes))
    axes = figure.subplots(len(schedules), 1, sharex=True, squeeze=False)[:, 0]
    colours = _colours(len(shapes))
    for axis, (title, schedule) in zip(axes, schedules.items()):
        _draw_lanes(axis, schedule, colours)
        axis.set_title(title, fontsize=10)
        axis.set_ylabel("rank")
    for shape, colour in zip(shapes, colours):
        axes[0].barh(0, 0, color=colour, label=str(shape))
    axes[0].barh(0, 0, color=_WAITING, label="waiting")
    axes[-1].set_xlabel(f"predicted {unit} since the start of the epoch")
    axes[-1].set_xlim(0, max(_drawn(schedule).max(axis=1).sum() for schedule in schedules.values()))
    handles, labels = _few(*axes[0].get_legend_handles_labels())
    figure.legend(handles, labels, title="shape (latent)", loc="outside lower center", ncols=8, fontsize=8)
    return _png(figure)


def loss_png(steps, losses):
    """
    Loss by optimizer step, with its running mean where there are enough steps for one.

    Args:
        steps: optimizer steps, int [n].
        losses: float [n].

    Returns: PNG, bytes.
    """
    figure = _figure(11, 3.6)
    axis = figure.subplots()
    axis.plot(steps, losses, color="tab:blue", alpha=0.5, marker=".", linewidth=1, label="loss of the step")
    window = len(losses) // 8
    if window >= 3:
        mean = np.convolve(losses, np.full(window, 1 / window), mode="valid")
        axis.plot(steps[window - 1 :], mean, color="tab:red", linewidth=2, label=f"mean of the last {window} steps")
    axis.set(xlabel="optimizer step", ylabel="loss")
    axis.set_title("Loss")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return _png(figure)


def _figure(width, height):
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _png(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _colours(count):
    from matplotlib import colormaps

    return colormaps["turbo"](np.linspace(0.08, 0.92, count)) if count else []


def _plain_log():
    """0.4 instead of 4 x 10^-1, and no labels between the decades of a long axis."""
    from matplotlib.ticker import LogFormatter

    return LogFormatter()


def _legend(axis, title):
    """Beside the axes."""
    handles, labels = _few(*axis.get_legend_handles_labels())
    place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    axis.legend(handles, labels, title=title, fontsize=8, title_fontsize=8, **place)


def _few(handles, labels):
    """Of very many legend entries evenly spaced ones and the last two, which are not shapes."""
    keep = np.unique(np.linspace(0, len(labels) - 1, _MOST_LEGEND_LINES).round().astype(int))
    keep = sorted({*keep.tolist(), len(labels) - 2, len(labels) - 1} & set(range(len(labels))))
    return [handles[i] for i in keep], [labels[i] for i in keep]


def _draw_shape(axis, measured, cost_model, power_law, label, colour):
    tokens = measured[0].tokens
    batch_sizes = np.array([m.batch_size for m in measured])
    axis.plot(batch_sizes * tokens, [m.seconds for m in measured], "o", color=colour, label=label, markersize=5)
    line = np.geomspace(batch_sizes.min() / 1.2, batch_sizes.max() * 1.2, 100)
    axis.plot(line * tokens, cost_model.seconds(line, tokens), color=colour, linewidth=1.2)
    axis.plot(line * tokens, power_law.seconds(line, tokens), color=colour, linewidth=1, linestyle=":")


def _draw_lanes(axis, schedule, colours):
    cost = _drawn(schedule)
    bucket = schedule.bucket.reshape(-1, schedule.world_size)
    ends = np.cumsum(cost.max(axis=1))
    starts = ends - cost.max(axis=1)
    ranks = np.unique(np.linspace(0, schedule.world_size - 1, _MOST_LANES).round().astype(int))
    for lane, rank in enumerate(ranks):
        axis.barh(lane, ends - starts, left=starts, height=0.8, color=_WAITING)
        axis.barh(lane, cost[:, rank], left=starts, height=0.8, color=[colours[b] for b in bucket[: len(cost), rank]])
    axis.vlines(ends, -0.5, len(ranks) - 0.5, color="white", linewidth=0.6)
    axis.set_yticks(range(len(ranks)), ranks)
    axis.set_ylim(len(ranks) - 0.5, -0.5)


def _drawn(schedule):
    """Predicted seconds of the first micro-steps, float64 [micro-steps, ranks]."""
    return schedule.cost.reshape(-1, schedule.world_size)[:_MOST_MICRO_STEPS]


def _relative_error(model, measurement):
    return float(model.seconds(measurement.batch_size, measurement.tokens)) / measurement.seconds - 1
