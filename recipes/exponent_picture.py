"""Why can one exponent not tell what a step costs? Draws docs/one_exponent.png from the measured H200 steps.

python recipes/exponent_picture.py --measurements tests/data/h200_wan_steps.jsonl --output docs/one_exponent.png
"""

import argparse
from pathlib import Path

import numpy as np

from adaptiveload_hf import fit_cost_model
from adaptiveload_hf.buckets.cost import read_measurements
from adaptiveload_hf.buckets.fit import CostFit
from adaptiveload_hf.errors import exit_on_user_error
from adaptiveload_hf.figures import PAPER, TEXT, USED, new_figure, plain_log, require_matplotlib, tidy, to_png


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measurements", type=Path, required=True, help="measurements.jsonl of benchmark_shapes.py")
    parser.add_argument("--output", type=Path, required=True, help="PNG")
    return parser.parse_args(argv)


def main():
    args = parse_args()
    require_matplotlib()
    measurements, _ = read_measurements(args.measurements)
    fit = fit_cost_model(measurements, ["roofline"])
    figure = new_figure(11, 4.2)
    left, right = figure.subplots(1, 2)
    draw_exponent(left, fit)
    draw_errors(right, fit)
    args.output.write_bytes(to_png(figure))
    print(args.output)


def draw_exponent(axis, fit: CostFit):
    """d log(seconds of one sample) / d log(S), of the roofline's work and of the power law."""
    measured = np.unique(fit.steps.tokens)
    tokens = np.geomspace(measured.min(), measured.max(), 200)
    law = fit.model
    exponent = tokens * (law.c1 + 2 * law.c2 * tokens) / law.seconds_per_sample(tokens)
    axis.plot(tokens, exponent, color=USED, linewidth=2)
    axis.axhline(fit.power_law.p, color=PAPER, linewidth=2)
    axis.plot(measured, np.full(len(measured), 0.02), "|", color=TEXT, transform=axis.get_xaxis_transform())
    axis.text(tokens[4], fit.power_law.p + 0.03, f"one exponent, p = {fit.power_law.p:.2f}", color=PAPER)
    axis.text(tokens[95], exponent[95] - 0.16, "linear + quadratic work", color=USED)
    axis.set_xscale("log")
    plain_log(axis.xaxis)
    axis.set_xlabel("tokens of one sample, S (ticks: measured)", color=TEXT)
    axis.set_ylabel("local exponent: how fast its seconds grow with S", color=TEXT)
    tidy(axis, "The exponent is another at each length")


def draw_errors(axis, fit: CostFit):
    """How far each form is from each measured step, over the step's seconds; hollow where the step is on the floor."""
    seconds, model = fit.steps.seconds, fit.model
    batch, tokens = fit.steps.batch_size[:, 0, 0], fit.steps.tokens[:, 0, 0]
    on_floor = model.a + batch * model.seconds_per_sample(tokens) <= model.floor
    axis.axhspan(-0.03, 0.03, color=USED, alpha=0.12, linewidth=0)
    for law, colour, name in (
        (fit.power_law, PAPER, "a + b·B·Sᵖ"),
        (model, USED, "max(floor, a + c₀·B + c₁·B·S + c₂·B·S²)"),
    ):
        off = fit.steps.predict(law) / seconds - 1
        axis.plot(seconds[~on_floor], off[~on_floor], "o", color=colour, markersize=7, alpha=0.9, label=name)
        axis.plot(seconds[on_floor], off[on_floor], "o", color=colour, markersize=6, markerfacecolor="none")
    axis.plot([], [], "o", color=TEXT, markerfacecolor="none", label="hollow: launching takes longer than the work")
    axis.set_xscale("log")
    plain_log(axis.xaxis)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:+.0%}" if value else "0%")
    axis.set_xlabel("measured seconds of a step", color=TEXT)
    axis.set_ylabel("predicted / measured - 1", color=TEXT)
    axis.legend(loc="upper right", frameon=False, fontsize=9)
    tidy(axis, f"What each form makes of {len(seconds)} measured steps (band: ±3%)")


if __name__ == "__main__":
    with exit_on_user_error("exponent_picture.py"):
        main()
