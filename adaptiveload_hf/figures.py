"""How does every picture of this package look? Matplotlib is imported only when drawing."""

import importlib.util
import io
from typing import TYPE_CHECKING

from .errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

WAITING = "0.82"
TEXT = "0.25"
# Okabe and Ito's colours, which colour-blind readers tell apart too. The law that is used is always the blue one.
USED, PAPER, OTHER = "#0072B2", "#E69F00", "#56B4E9"
LIMIT = "#D55E00"


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """
    Raises:
        UserError: matplotlib is not installed.
    """
    if not can_draw():
        raise UserError("Pictures need matplotlib, which is not installed. Install it: pip install matplotlib")


def new_figure(width: float, height: float) -> "Figure":
    """A matplotlib figure of that size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def to_png(figure: "Figure") -> bytes:
    """A picture of it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def tidy(axis: "Axes", title: str, grid: str = "both") -> None:
    """Title at the left, no frame that says nothing, a faint grid behind the data."""
    axis.set_title(title, fontsize=11, loc="left", color=TEXT)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis=grid, alpha=0.25)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=9, colors=TEXT)


def token_colours(tokens: list[int]) -> tuple[list, "ScalarMappable"]:
    """Short samples light, long ones dark, in even steps: most shapes lie close together in tokens.

    Args:
        tokens: of each shape.

    Returns: (colour of each shape, a mappable for a colour bar over the shapes' positions by tokens).
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap

    distinct = sorted(set(tokens))
    last = max(len(distinct) - 1, 1)
    steps = [colormaps["viridis_r"](0.06 + 0.9 * position / last) for position in range(len(distinct))]
    mappable = ScalarMappable(cmap=ListedColormap(steps))
    mappable.set_clim(-0.5, len(distinct) - 0.5)
    return [steps[distinct.index(number)] for number in tokens], mappable


def plain_log(axis: "Axis") -> None:
    """A logarithmic axis with 0.5, 1, 2, 5 instead of powers of ten alone."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
