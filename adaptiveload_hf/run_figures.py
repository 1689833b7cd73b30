"""Which picture shows how a training run goes?"""

import numpy as np

from .figures import LIMIT, OTHER, TEXT, USED, new_figure, tidy, to_png

# Key of metrics.jsonl -> (title, whether 0 belongs on the axis); those that a run has not written are left out.
_PANELS = {
    "loss": ("loss", False),
    "seconds": ("seconds of an optimizer step", True),
    "samples_per_second": ("samples a second, all ranks", True),
    "balance_efficiency": ("predicted balance efficiency: share of the ranks' time that is work", False),
}
_FEWEST_FOR_MEAN = 24


def run_png(records):
    """
    One panel for each metric of a run, by optimizer step, with a running mean where there are enough steps for one.

    Args:
        records: lines of metrics.jsonl, list[dict], sorted by step.

    Returns: PNG, bytes.
    """
    panels = {key: words for key, words in _PANELS.items() if any(_is_number(r.get(key)) for r in records)}
    figure = new_figure(11, 0.6 + 1.9 * len(panels))
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (key, (title, from_zero)) in zip(axes, panels.items()):
        steps, values = _series(records, key)
        axis.plot(steps, values, color=OTHER, linewidth=0.9, marker="." if len(steps) < 60 else None)
        window = len(values) // 8
        if len(values) >= _FEWEST_FOR_MEAN:
            mean = np.convolve(values, np.full(window, 1 / window), mode="valid")
            axis.plot(steps[window - 1 :], mean, color=USED, linewidth=2, label=f"mean of the last {window} steps")
        if key == "seconds":
            waited = _series(records, "data_wait_seconds")
            if len(waited[0]):
                axis.fill_between(*waited, color=LIMIT, alpha=0.6, linewidth=0, label="of it waiting for data")
        tidy(axis, title)
        if from_zero:
            axis.set_ylim(0, 1.1 * max(values))
        if axis.get_legend_handles_labels()[0]:
            axis.legend(
                fontsize=9, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2
            )
    axes[-1].set_xlabel("optimizer step", color=TEXT)
    return to_png(figure)


def _series(records, key):
    found = [(record["step"], record[key]) for record in records if _is_number(record.get(key))]
    return [step for step, _ in found], [value for _, value in found]


def _is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))
