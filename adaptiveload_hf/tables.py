"""How does a command print? Data on stdout as a table or JSON, words on stderr."""

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import Any


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def print_table(header: Sequence[str], rows: Iterable[Iterable]) -> None:
    """A table; on a terminal too narrow for it one line a cell. Nothing is folded or cut off."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = [[str(cell) for cell in row] for row in rows]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, name in enumerate(header):
        table.add_column(name, no_wrap=True, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
    width = console.measure(table, options=console.options.update(max_width=1000)).maximum
    if sys.stdout.isatty() and console.width < width:
        widest = max(map(len, header))
        for row in rows:
            print(*(f"{name:{widest}}  {cell}" for name, cell in zip(header, row)), sep="\n", end="\n\n")
    else:
        console.width = width
        console.print(table)


def say(words: str) -> None:
    print(words, file=sys.stderr)


def say_next(*words: str) -> None:
    say("next: " + shlex.join(words))


def in_unit(fields: Any, unit: str) -> Any:
    """The same for JSON; where the cost is no time, no key says seconds, and nothing is per second."""
    if unit == "seconds":
        return fields
    if isinstance(fields, list):
        return [in_unit(item, unit) for item in fields]
    if not isinstance(fields, dict):
        return fields
    renamed = {name: in_unit(value, unit) for name, value in fields.items() if not name.endswith("_per_second")}
    return {name.replace("seconds", unit.replace(" ", "_")): value for name, value in renamed.items()}
