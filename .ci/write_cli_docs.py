"""Writes docs/cli.md from the commands themselves. Usage: python .ci/write_cli_docs.py"""

import inspect
from pathlib import Path

import typer

from adaptiveload_hf import cli

PATH = Path(__file__).parent.parent / "docs" / "cli.md"
HEAD = """# The command line

<!-- Written by `python .ci/write_cli_docs.py` from the commands; a test holds it up to date. -->

The package installs the command `adaptiveload`. From a dataset to balanced ranks:

```bash
adaptiveload scan DATASET                            # which shapes, and how many samples of each
accelerate launch recipes/benchmark_shapes.py ...    # what a step costs (or: fit --from-log, count)
adaptiveload plan CONFIG --dataset DATASET           # the batch size of each bucket, and what limits it
adaptiveload simulate CONFIG --dataset DATASET       # how much faster an epoch becomes
adaptiveload report CONFIG --dataset DATASET --output report.html
adaptiveload push CONFIG user/repo                   # share it with everyone who has the same model and GPUs
```

- `CONFIG` is a folder with a `bucket_config.json` or a Hub id ([hub.md](hub.md)).
- Tables go to stdout, messages to stderr; `--json` prints JSON on stdout. The last message is the next command to run.
- Exit status: 0 success; 1 a mistake that you can fix, in one line `adaptiveload: error: ...`; 2 wrong usage.
- On a terminal too narrow for a table, each cell gets a line. Commands use the network only for a Hub id.
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
