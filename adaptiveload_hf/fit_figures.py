"""Which pictures show how well each fitted law meets the measured steps?"""

from collections.abc import Sequence

import numpy as np

from .buckets.cost import CostModel, Measurement
from .figures import OTHER, PAPER, TEXT, USED, new_figure, plain_log, tidy, to_png, token_colours

LAWS = {
    "power_law": "the paper's power law\na + b B S$^p$",
    "additive": "additive\na + B (c$_0$ + c$_1$S + c$_2$S$^2$)",
    "roofline": "roofline\nmax(floor, a + B (c$_0$ + c$_1$S + c$_2$S$^2$))",
}
_NEAR = 0.1  # the band that a good law stays in
_MOST_SHAPES = 24


def fit_png(measurements: Sequence[Measurement], laws: dict[str, CostModel], used: str) -> bytes:
    """One panel a law: what it predicts for each measured micro-batch, against what that took.

    Args:
        measurements: those that ran out of memory are left out.
        laws: by kind, all fitted to these measurements.
        used: the kind that plans are made with.

    Returns: PNG.
    """
    timed = [m for m in measurements if not m.oom]
    seconds = np.array([m.seconds for m in timed])
    colours, mappable = token_colours([m.tokens for m in timed])
    figure = new_figure(0.7 + 3.6 * len(laws), 4.3)
    axes = figure.subplots(1, len(laws), sharex=True, sharey=True, squeeze=False)[0]
    predictions = [np.array([float(law.seconds(m.batch_size, m.tokens)) for m in timed]) for law in laws.values()]
    drawn = np.concatenate([seconds, *predictions])  # a law that misses must not hide it beyond the edge
    ends = np.array([drawn.min() / 1.3, drawn.max() * 1.3])
    for axis, kind, predicted in zip(axes, laws, predictions):
        axis.fill_between(ends, ends * (1 - _NEAR), ends * (1 + _NEAR), color="0.92", label=f"within {_NEAR:.0%}")
        axis.plot(ends, ends, color="0.5", linewidth=1)
        axis.scatter(seconds, predicted, c=colours, s=34, edgecolors="white", linewidths=0.5, zorder=3)
        error = np.abs(predicted / seconds - 1)
        name, _, formula = LAWS.get(kind, kind).partition("\n")
        name += " (used)" if kind == used else ""
        tidy(
            axis,
            f"{name}\n{formula}\nmisses by {_percent(np.median(error))} (median), {_percent(error.max())} (worst)",
        )
        axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured seconds")
    plain_log(axes[0].xaxis)
    plain_log(axes[0].yaxis)
    axes[0].set_ylabel("predicted seconds")
    axes[0].legend(loc="upper left", fontsize=9, frameon=False)
    _bar_of_tokens(figure, axes, mappable, sorted({m.tokens for m in timed}))
    return to_png(figure)


def errors_png(measurements: Sequence[Measurement], laws: dict[str, CostModel], used: str) -> bytes:
    """One row a shape: by how much each law misses each of its measurements.

    Args:
        as for `fit_png`.

    Returns: PNG.
    """
    timed = [m for m in measurements if not m.oom]
    shapes = sorted({(m.tokens, m.shape) for m in timed})
    shapes = [shapes[i] for i in np.unique(np.linspace(0, len(shapes) - 1, _MOST_SHAPES).round().astype(int))]
    figure = new_figure(9.5, 1.6 + 0.34 * len(shapes))
    axis = figure.subplots()
    colours = dict(zip([kind for kind in laws if kind != used], (PAPER, OTHER))) | {used: USED}
    for lane, (kind, law) in enumerate(laws.items()):
        row, error = [], []
        for position, (_, shape) in enumerate(shapes):
            for m in [m for m in timed if m.shape == shape]:
                row.append(position + 0.22 * (lane - (len(laws) - 1) / 2))
                error.append(100 * (float(law.seconds(m.batch_size, m.tokens)) / m.seconds - 1))
        label = LAWS.get(kind, kind).split("\n")[0] + (" (used)" if kind == used else "")
        axis.scatter(error, row, s=26, color=colours[kind], label=label, alpha=0.9, linewidths=0)
    axis.axvline(0, color="0.4", linewidth=1)
    for position in range(1, len(shapes), 2):
        axis.axhspan(position - 0.5, position + 0.5, color="0.96", zorder=0)
    axis.set_yticks(range(len(shapes)), [f"{shape}   S = {tokens:,}" for tokens, shape in shapes])
    axis.set_ylim(len(shapes) - 0.5, -0.5)
    axis.set_xlabel("predicted minus measured, in % of measured (0: met exactly)")
    tidy(axis, "Error of each law, by shape (latent frames x height x width); a point is one measured batch size", "x")
    figure.legend(loc="outside lower center", ncols=len(laws), fontsize=9, frameon=False)
    return to_png(figure)


def _bar_of_tokens(figure, axes, mappable, tokens):
    bar = figure.colorbar(mappable, ax=axes, aspect=30, pad=0.01)
    shown = np.unique(np.linspace(0, len(tokens) - 1, 9).round().astype(int))
    bar.set_ticks(shown, labels=[f"{tokens[i]:,}" for i in shown])
    bar.set_label("tokens S of one sample", color=TEXT)
    bar.ax.tick_params(labelsize=9, colors=TEXT, length=0)
    bar.outline.set_visible(False)


def _percent(share):
    if share < 0.0005:
        return "under 0.1%"
    return f"{100 * share:.2g}%" if share < 0.1 else f"{100 * share:.0f}%"
