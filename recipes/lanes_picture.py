"""What did the ranks do while they trained: which micro-batches, and how long did they wait for one another?

python recipes/lanes_picture.py --comparison compare/compare.json --output lanes.png \\
    --arms equal_token/none/eager dual/auto/patched

An arm of which a file has a prediction only is drawn as predicted, and called so.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from matplotlib.patches import Patch

from adaptiveload_hf import LatentShape, TokenGeometry, UserError
from adaptiveload_hf.errors import exit_on_user_error
from adaptiveload_hf.figures import TEXT, WAITING, new_figure, require_matplotlib, tidy, to_png, token_colours

LANE = 0.8  # of the height that a rank has
NARROWEST = 0.015  # of the drawn seconds, for a bar with its batch size written in it
IN_LEGEND = 4


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparison", type=Path, nargs="+", required=True,
        help="JSON of compare_schedules.py; an arm is taken from the first that has it")  # fmt: skip
    parser.add_argument("--arms", nargs="+", required=True, help="which of its arms, from the top")
    parser.add_argument("--ranks", type=int, help="where the file has several numbers of them")
    parser.add_argument("--seconds", type=float, help="draw only this many (default: all)")
    parser.add_argument("--output", type=Path, required=True, help="PNG")
    return parser.parse_args(argv)


def main():
    args = parse_args()
    require_matplotlib()
    rows = [row for path in args.comparison for row in json.loads(path.read_text(encoding="utf-8"))["arms"]]
    drawable = [row for row in rows if "starts" in row and args.ranks in (None, row["ranks"])]
    arms = {row["arm"]: row for row in reversed(drawable)}
    unknown = [name for name in args.arms if name not in arms]
    if unknown:
        raise UserError(
            f"{', '.join(map(str, args.comparison))}: there are the arms {', '.join(reversed(arms))}, but not "
            f"{', '.join(unknown)}."
        )
    chosen = [arms[name] for name in args.arms]
    ranks = len(chosen[0]["starts"])
    figure = new_figure(11, 0.9 + len(chosen) * (0.75 + 0.36 * ranks))
    axes = figure.subplots(len(chosen), 1, sharex=True, squeeze=False)[:, 0]
    shapes = sorted({shape for arm in chosen for shape, _, _ in arm["micro_batches"]}, key=tokens_of)
    colours = dict(zip(shapes, token_colours([tokens_of(shape) for shape in shapes])[0]))
    seconds = args.seconds or max(map(seconds_of, chosen))
    for axis, arm in zip(axes, chosen):
        draw_lanes(axis, arm, colours, seconds, seconds_of(chosen[0]))
    axes[-1].set_xlabel("seconds; the number in a bar is its batch size", color=TEXT)
    axes[-1].set_xlim(0, seconds)
    named = [shapes[i] for i in np.unique(np.linspace(0, len(shapes) - 1, IN_LEGEND).round().astype(int))]
    handles = [
        Patch(color=colours[shape], label=f"{LatentShape.parse(shape).pixels()}, S = {tokens_of(shape):,}")
        for shape in named
    ]
    handles.append(Patch(color=WAITING, label="waiting for the slowest rank"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    args.output.write_bytes(to_png(figure))
    print(args.output)


def tokens_of(shape: str) -> int:
    return TokenGeometry().tokens(LatentShape.parse(shape))


def draw_lanes(axis, arm: dict, colours: dict, seconds: float, before: float) -> None:
    """A bar a micro-batch, as long as its rank's blocks took; grey up to where the micro-step's slowest rank ends.

    A micro-step's wall time is the same on all ranks under FSDP. The share of it that a rank computes is that of its
    block over the slowest rank's, both measured by device events. The numbers are batch sizes.
    """
    starts = np.mean(arm["starts"], axis=0)
    walls, ranks = np.diff(starts), len(arm["starts"])
    blocks = np.array([block for _, _, block in arm["micro_batches"]]).reshape(-1, ranks)
    busy = walls[:, None] * blocks / blocks.max(axis=1, keepdims=True)
    waiting = 1 - busy.sum() / walls.sum() / ranks
    shown = np.searchsorted(starts[:-1], seconds)
    walls, busy = walls[:shown], busy[:shown]
    bars = {"height": LANE, "edgecolor": "white", "linewidth": 0.8}
    for rank in range(ranks):
        batches = arm["micro_batches"][rank::ranks][:shown]
        axis.barh(rank, walls, left=starts[:shown], color=WAITING, **bars)
        axis.barh(rank, busy[:, rank], left=starts[:shown], color=[colours[shape] for shape, _, _ in batches], **bars)
        for left, width, (shape, size, _) in zip(starts, busy[:, rank], batches):
            if width > NARROWEST * seconds and left + width < seconds:
                ink = "white" if sum(colours[shape][:3]) < 1.5 else TEXT
                axis.text(left + width / 2, rank, str(size), ha="center", va="center", fontsize=7, color=ink)
    axis.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axis.invert_yaxis()
    axis.axvline(seconds_of(arm), color=TEXT, linewidth=1, linestyle=":")
    tidy(axis, title_of(arm, before, waiting), "x")


def title_of(arm: dict, before: float, waiting: float) -> str:
    policy, balance, kernels = arm["arm"].split("/")
    sizes = {"equal_token": "equal tokens", "dual": "memory and compute limit"}.get(policy, policy)
    order = {"none": "random order", "same_bucket": "same bucket on all ranks"}.get(balance, "balanced by cost")
    how = "measured" if "seconds" in arm else "predicted"
    faster = "" if seconds_of(arm) == before else f" ({before / seconds_of(arm):.2f}x)"
    return f"{seconds_of(arm):.1f} s{faster}, {waiting:.0%} waiting ({how}): {sizes}, {order}, {kernels}"


def seconds_of(arm: dict) -> float:
    return arm["seconds"] if "seconds" in arm else arm["predicted"]["epoch_seconds"]


if __name__ == "__main__":
    with exit_on_user_error("lanes_picture.py"):
        main()
