"""Which picture shows how a training run goes?"""

import numpy as np

from .figures import LIMIT, OTHER, PAPER, TEXT, USED, new_figure, tidy, to_png

# Title, lowest and highest value on the axis (None: as the data has them), and the keys of metrics.jsonl with their
# words; the first one that there is is drawn with its mean. What a run has not written is left out.
_PANELS = (
    ("loss", (None, None), {"loss": "of a step"}),
    ("seconds of an optimizer step", (0, None), {"seconds": "measured", "predicted_seconds": "predicted"}),
    ("samples a second, all ranks", (0, None), {"samples_per_second": "of a step"}),
    (
        "balance efficiency: share of the ranks' time that is work",
        (None, 1.02),
        {"measured_balance_efficiency": "measured, of the step before", "balance_efficiency": "predicted"},
    ),
)
_FEWEST_FOR_MEAN = 24


def run_png(records: list[dict]) -> bytes:
    """One panel for each metric of a run, by optimizer step, with a running mean where there are enough steps for one.

    Args:
        records: lines of metrics.jsonl, sorted by step.

    Returns: PNG.
    """
    panels = [panel for panel in _PANELS if any(_series(records, key)[0] for key in panel[2])]
    figure = new_figure(11, 0.6 + 1.9 * len(panels))
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, limits, keys) in zip(axes, panels):
        _draw_panel(axis, records, keys)
        tidy(axis, title)
        axis.set_ylim(*limits)
        place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
        axis.legend(**place, fontsize=9, frameon=False, ncols=4)
    axes[-1].set_xlabel("optimizer step", color=TEXT)
    return to_png(figure)


def _draw_panel(axis, records, keys):
    (first, words), *others = [(key, words) for key, words in keys.items() if _series(records, key)[0]]
    steps, values = _series(records, first)
    has_mean = len(values) >= _FEWEST_FOR_MEAN
    marker = "." if len(steps) < 60 else None
    axis.plot(steps, values, color=OTHER if has_mean else USED, linewidth=0.9, marker=marker, label=words)
    for key, words in others:
        axis.plot(*_series(records, key), color=PAPER, linewidth=1.2, label=words)
    if has_mean:
        window = len(values) // 8
        sums = np.cumsum([0, *values])
        mean = (sums[window:] - sums[:-window]) / window
        axis.plot(steps[window - 1 :], mean, color=USED, linewidth=2, label=f"mean of the last {window} steps")
    if first == "seconds":
        waited = _series(records, "data_wait_seconds")
        if waited[0]:
            axis.fill_between(*waited, color=LIMIT, alpha=0.6, linewidth=0, label="of it waiting for data")


def _series(records, key):
    found = [(record["step"], record[key]) for record in records if _is_number(record.get(key))]
    return [step for step, _ in found], [value for _, value in found]


def _is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))
