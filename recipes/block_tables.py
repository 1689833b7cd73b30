"""How does what block_speed.py measured read as tables?"""

from block_cases import COLUMNS, CORRECT, SHORT, WITHOUT_COMPILE


def tables(result: dict) -> list[list[list[str]]]:
    """Rows of cells, the first one the head: times, memory, wrong gradients, launches, longest. What was not measured
    is left out."""
    parts = result["parts"]
    timed = [row for name in ("blocks", "lora", "families", "whole") for row in parts.get(name, [])]
    columns = (("milliseconds", "ms", ".1f"), ("fastest", "fastest ms", ".1f"), ("peak_gib", "GiB", ".2f"))
    found = [compared(timed, *about) for about in columns if timed]
    if wrong := wrong_gradients(timed):
        found.append([["wrong gradients", "tokens", "training", "of", "worst", "off by"], *wrong])
    for row in parts.get("launches", []):
        counts = [str(row[name]) for name in WITHOUT_COMPILE]
        found.append([["kernels", *WITHOUT_COMPILE], [row["model"], *counts]])
    for row in parts.get("longest", []):
        longest = [f"{row[name]['tokens']:,} ({row[name]['tokens'] / SHORT - 1:+.0%})" for name in WITHOUT_COMPILE]
        found.append([[f"tokens in {row['budget_gib']:.1f} GiB", *WITHOUT_COMPILE], [row["model"], *longest]])
    return found


def compared(rows: list[dict], key: str, unit: str, form: str) -> list[list[str]]:
    """What each contender needs, and the ratios that the gates are about."""
    ratios = (("patched", "eager"), ("patched", "compile"), ("patched", CORRECT), ("patched + compile", "compile"))
    lines = [[unit, "tokens", "training", *COLUMNS, *(f"{one} / {other}" for one, other in ratios)]]
    for row in rows:
        values = {name: row[name][key] for name in COLUMNS if key in row.get(name, ())}
        cells = [format(values[name], form) if name in values else "" for name in COLUMNS]
        cells += [
            f"{values[one] / values[other]:.2f}" if {one, other} <= values.keys() else "" for one, other in ratios
        ]
        lines.append([row["model"], f"{row['tokens']:,}", row["training"], *cells])
    return lines


def wrong_gradients(rows: list[dict]) -> list[list[str]]:
    """Contenders of which a parameter's gradient is further from eager's than rounding takes it."""
    lines = []
    for row in rows:
        for name in (name for name in COLUMNS if "worst_gradient" in row.get(name, {})):
            error, parameter = row[name]["worst_gradient"]
            if error > 0.1:
                lines.append([row["model"], f"{row['tokens']:,}", row["training"], name, parameter, f"{error:.2g}"])
    return lines


def print_tables(result: dict, markdown: bool):
    about = ", ".join(f"{name} {result[name]}" for name in ("driver", "torch", "diffusers", "date"))
    print(f"{result['gpu']}, {about}")
    for lines in tables(result):
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        if markdown:
            lines = [lines[0], ["---"] * len(widths), *lines[1:]]
        print()
        for line in lines:
            padded = [
                text.rjust(width) if i else text.ljust(width) for i, (text, width) in enumerate(zip(line, widths))
            ]
            print(f"| {' | '.join(line)} |" if markdown else "  ".join(padded))
