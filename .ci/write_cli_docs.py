"""Writes docs/cli.md from the commands themselves. Usage: python .ci/write_cli_docs.py"""

import inspect
from pathlib import Path

import typer

from adaptiveload_hf import cli

PATH = Path(__file__).parent.parent / "docs" / "cli.md"
HEAD = """# The command line

<!-- Written by `python .ci/write_cli_docs.py` from the commands; a test holds it up to date. -->

The package brings the command `adaptiveload`. From data to an even load:

```bash
adaptiveload scan DATASET                            # which shapes, how many of each
accelerate launch recipes/benchmark_shapes.py ...    # what a step costs; or: fit --from-log, count
adaptiveload plan CONFIG --dataset DATASET           # batch size of each bucket, and what limits it
adaptiveload simulate CONFIG --dataset DATASET       # what that brings
adaptiveload report CONFIG --dataset DATASET --output report.html
adaptiveload push CONFIG user/repo                   # for everyone with the same model and GPUs
```

- `CONFIG` is a folder with a `bucket_config.json` or a Hub id; what is in it, and how it is shared: [hub.md](hub.md).
- Tables go to stdout, words to stderr, and `--json` makes stdout JSON. The last word is the next command to type.
- Exit status: 0 done; 1 a mistake that you can mend, in one line `adaptiveload: error: ...`; 2 wrong usage.
- On a terminal too narrow for a table each cell has a line. No command needs a network, unless it is given a Hub id.
"""


def text() -> str:
    """The page."""
    commands = typer.main.get_command(cli.app).commands
    return HEAD + "".join(f"\n{_section(name, command)}" for name, command in commands.items())


def _section(name, command) -> str:
    words, _, example = inspect.cleandoc(command.help).partition("\b\nExample:\n")
    rows = [row for parameter in command.params if (row := _row(parameter))]
    lines = [f"## adaptiveload {name}", "", words.strip(), "", "```bash", inspect.cleandoc(example).strip(), "```", ""]
    return "\n".join([*lines, "| | |", "|---|---|", *rows]) + "\n"


def _row(parameter) -> str | None:
    if "--help" in parameter.opts:
        return None
    if parameter.param_type_name == "argument":
        left = f"`{parameter.metavar.strip('[]')}`"
    else:
        names = " / ".join([*parameter.opts, *parameter.secondary_opts])
        left = f"`{names}{f' {parameter.metavar}' if parameter.metavar else ''}`"
    facts = [parameter.help]
    if parameter.required:
        facts.append("Required.")
    elif parameter.default not in (None, False, [], ()):
        facts.append(f"Default: {parameter.default}.")
    return f"| {left} | {' '.join(facts)} |".replace("auto|", "auto\\|").replace("SECONDS|", "SECONDS\\|")


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
