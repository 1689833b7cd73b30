"""What does `adaptiveload` run? One module in `commands` for each verb."""

import sys
import warnings

import typer

from .commands.fit import fit
from .commands.plan import plan
from .commands.report import report
from .commands.simulate import simulate
from .errors import exit_on_user_error
from .tables import say

app = typer.Typer(
    help="Fit what a training step costs, plan batch sizes, predict the gain, and look at a run.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)
for command in (fit, plan, simulate, report):
    app.command()(command)


def main():
    """Run the command line; a UserError ends it with one line and status 1."""
    sys.stdout.reconfigure(errors="backslashreplace")
    warnings.showwarning = lambda message, *_, **__: say(f"adaptiveload: warning: {message}")
    with exit_on_user_error("adaptiveload"):
        app()
