"""What do the numbers of kernel_speed.py say: as a table, a page, a picture, and against our goals?"""

from dataclasses import dataclass
from pathlib import Path

COLUMNS = ("CUDA", "Triton", "eager", "torch.compile", "liger", "cuDNN", "plainest")
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Goal:
    """One goal: what was wanted and found, and whether that is enough."""

    name: str
    wanted: str
    found: str
    met: bool


def _name(row: dict) -> str:
    return f"{row['op']} {row['shape']} {row['modulation']} {row['direction']}"


def _at_least(name: str, wanted: float, found: float) -> Goal:
    return Goal(name, f">= {wanted:g}", f"{found:.3g}", found >= wanted)


def _at_most(name: str, wanted: float, found: float) -> Goal:
    return Goal(name, f"<= {wanted:.3g}", f"{found:.3g}", found <= wanted)


# (op, shape, modulation): how many times as fast as eager, forward and backward.
_TIMES_EAGER = {
    ("layer_norm_modulate", "2x32768x5120", "float32"): (12, 10),
    ("layer_norm_modulate", "2x32768x5120", "bfloat16"): (6, 4.5),
}
_TRITON = {
    ("layer_norm_modulate", "2x32768x5120", "float32"): (0.75, 0.50),
    ("layer_norm_modulate", "2x32768x1536", "float32"): (0.75, 0.50),
}
_KEPT_LESS_THAN_EAGER = 0.79
_HOST_SHARE_OF_EAGER = 0.7
_SMALL_SHARE, _SMALL_MICROSECONDS = 1.5, 2.5


def goals_of(result: dict) -> list[Goal]:
    """Our goals (issue 4) that this run can judge: those of the CUDA kernels, if it has them, and of Triton."""
    found = []
    for row in result["rows"]:
        name, case, side = _name(row), (row["op"], row["shape"], row["modulation"]), DIRECTIONS.index(row["direction"])
        times, roof = row["microseconds"], row["roof"]
        if case in _TRITON and "Triton" in roof:
            found.append(_at_least(f"{name}, Triton, share of the roof", _TRITON[case][side], roof["Triton"]))
        if "CUDA" not in roof:
            continue
        if row["goal"]:
            found.append(_at_least(f"{name}, share of the roof", row["goal"], roof["CUDA"]))
        if case in _TIMES_EAGER:
            speed = times["eager"] / times["CUDA"]
            found.append(_at_least(f"{name}, times as fast as eager", _TIMES_EAGER[case][side], speed))
        if "torch.compile" in times:
            speed = times["torch.compile"] / times["CUDA"]
            found.append(_at_least(f"{name}, times as fast as torch.compile", 1, speed))
        kept = row["bytes_kept_an_element"]
        if case in _TIMES_EAGER and case[2] == "float32" and side == 0:
            less = 1 - kept["CUDA"] / kept["eager"]
            found.append(_at_least(f"{name}, kept less than eager", _KEPT_LESS_THAN_EAGER, less))
    return found + _goals_of_small_work(result) + _goals_of_host_time(result)


def _goals_of_small_work(result: dict) -> list[Goal]:
    found = []
    for row in result["small_rows"]:
        if "CUDA" in row["microseconds"]:
            copied = row["least_bytes"] / result["copy_terabytes_per_second"] / 1e6
            wanted = _SMALL_SHARE * max(_SMALL_MICROSECONDS, copied)
            found.append(_at_most(f"{_name(row)}, microseconds", wanted, row["microseconds"]["CUDA"]))
    return found


def _goals_of_host_time(result: dict) -> list[Goal]:
    times = {(row["op"], row["contender"]): row for row in result["host_microseconds"]}
    found = []
    for (op, contender), row in times.items():
        if contender == "CUDA" and (op, "eager") in times:
            for direction in DIRECTIONS:
                share = row[direction] / times[op, "eager"][direction]
                found.append(_at_most(f"{op} {direction}, host time over eager's", _HOST_SHARE_OF_EAGER, share))
    return found


def table_of(result: dict) -> list[list[str]]:
    """Cells, the head first: microseconds and, in brackets, the share of the roof."""
    rows = [*result["rows"], *result["small_rows"]]
    names = [name for name in COLUMNS if any(name in row["roof"] for row in rows)]
    lines = [["operation", "B x S x D", "modulation", "direction", "goal", *names]]
    for row in rows:
        cells = [
            row["op"],
            row["shape"],
            row["modulation"],
            row["direction"],
            f"{row['goal']:.2f}" if row["goal"] else "",
        ]
        for name in names:
            microseconds = row["microseconds"].get(name)
            digits = 0 if microseconds is not None and microseconds >= 100 else 1
            cells.append("" if microseconds is None else f"{microseconds:.{digits}f} ({row['roof'][name]:.2f})")
        lines.append(cells)
    return lines


def print_table(result: dict):
    print(f"{result['gpu']}, driver {result['driver']}, torch {result['torch']}, Triton {result['triton']}, "
          f"copy {result['copy_terabytes_per_second']:.2f} TB/s")  # fmt: skip
    lines = table_of(result)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    for row in result["rows"]:
        if row["direction"] == "forward":
            kept = ", ".join(f"{name} {size:.2f}" for name, size in row["bytes_kept_an_element"].items())
            print(f"bytes an element after forward, {row['op']} {row['shape']} {row['modulation']}: {kept}")
    for row in result["host_microseconds"]:
        times = f"forward {row['forward']:.1f} us, backward {row['backward']:.1f} us"
        print(f"host, {row['op']}, {row['contender']}: {times}")
    _print_spread(result)
    goals = goals_of(result)
    for goal in sorted(goals, key=lambda goal: goal.met):
        print(f"{'met   ' if goal.met else 'missed'}  {goal.name}: {goal.wanted} wanted, {goal.found} found")
    print(f"goals met: {sum(goal.met for goal in goals)} of {len(goals)}")


def _print_spread(result: dict):
    """How much the same kernel's time differs between placements of its buffers."""
    spreads = [
        ((max(times) - min(times)) / min(times), f"{_name(row)}, {name}")
        for row in result["rows"]
        for name, times in row["microseconds_by_placement"].items()
    ]
    for spread, name in sorted(spreads, reverse=True)[:5]:
        print(f"slowest placement over fastest, {name}: {1 + spread:.3f}")


def print_markdown(result: dict):
    for i, line in enumerate(table_of(result)):
        print("| " + " | ".join(line) + " |")
        if i == 0:
            print("|" + "---|" * len(line))


def draw(result: dict, path: Path):
    """Achieved bandwidth on the least bytes over those bytes, under the line that a copy reaches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    copy = result["copy_terabytes_per_second"]
    axes.axhline(copy, color="0.3", linewidth=1)
    axes.annotate("device copy", (0.01, copy), xycoords=("axes fraction", "data"), va="bottom", fontsize=9)
    rows = [*result["rows"], *result["small_rows"]]
    names = [name for name in COLUMNS if any(name in row["roof"] for row in rows)]
    for index, name in enumerate(names):
        for direction, marker in zip(DIRECTIONS, "ov"):
            points = [row for row in rows if row["direction"] == direction and name in row["roof"]]
            label = name if direction == "forward" else None
            sizes = [row["least_bytes"] / 1e9 for row in points]
            axes.plot(sizes, [row["roof"][name] * copy for row in points], marker, color=f"C{index}", label=label,
                      markersize=5, linestyle="none", alpha=0.8)  # fmt: skip
    axes.set(xscale="log", xlabel="least bytes of the call, GB", ylabel="TB/s on the least bytes", ylim=(0, None))
    axes.set_title(f"{result['gpu']}: circles forward, triangles backward", fontsize=10)
    axes.legend(ncols=2, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
