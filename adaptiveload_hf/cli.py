"""What does `adaptiveload` run? One module in `commands` for each verb."""

import inspect
import sys
import warnings

import typer

from .commands.count import count
from .commands.fit import fit
from .commands.plan import plan
from .commands.push import push
from .commands.report import report
from .commands.scan import scan
from .commands.simulate import simulate
from .errors import exit_on_user_error, options_as_flags
from .tables import say

app = typer.Typer(
    help="Scan a dataset, fit what a training step costs, plan batch sizes, predict the gain, look at it, share it.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)
for command in (scan, fit, count, plan, simulate, report, push):
    app.command()(options_as_flags(inspect.signature(command).parameters, dash="-")(command))


def main():
    """Run the command line; a UserError ends it with one line and status 1."""
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's, or one that a program set, has none
        sys.stdout.reconfigure(errors="backslashreplace")
    warnings.showwarning = lambda message, *_, **__: say(f"adaptiveload: warning: {message}")
    with exit_on_user_error("adaptiveload"):
        app()
