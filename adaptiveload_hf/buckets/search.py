"""Which parameters of a form of the cost come nearest to timed steps, without being led astray by a few?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .cost import Additive, CostModel, PowerLaw, Roofline

# S is divided by this while fitting, so that all coefficients are of the same order.
_TOKEN_SCALE = 1e4
# What the parameters of Additive and Roofline are multiplied by then: a or floor, c0, c1, c2, a.
_UNITS = _TOKEN_SCALE ** np.array([0.0, 0.0, 1.0, 2.0, 0.0])
# Compute-bound steps repeat within about 2% (NVIDIA H200, tests/data); launch-bound ones stray by 20% and more.
LEAST_RESIDUAL_SCALE = 0.02
_HIGHEST_EXPONENT = 4.0
_STARTS_KEPT = 2
FORMS: dict[str, type[CostModel]] = {model.kind: model for model in (PowerLaw, Additive, Roofline)}


@dataclass(frozen=True)
class TimedSteps:
    """Steps of K micro-steps on W ranks, which wait for their slowest in each micro-step.

    Args:
        batch_size, tokens: B and S of each micro-batch, float64 [steps, K, W].
        seconds: of each step, float64 [steps].
        names: what a message calls each step.
    """

    batch_size: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray
    names: tuple[str, ...]

    def predict(self, model: CostModel) -> np.ndarray:
        """Seconds of each step, float64 [steps]: the sum over micro-steps of the maximum over ranks."""
        return model.seconds(self.batch_size, self.tokens).max(axis=2).sum(axis=1)

    def take(self, rows: np.ndarray) -> TimedSteps:
        """The steps with these indices."""
        names = tuple(self.names[row] for row in rows)
        return TimedSteps(self.batch_size[rows], self.tokens[rows], self.seconds[rows], names)


def relative_errors(model: CostModel, steps: TimedSteps) -> np.ndarray:
    """|predicted / measured - 1| of each step, float64 [steps]."""
    return np.abs(steps.predict(model) / steps.seconds - 1)


def model_of(kind: str, x: np.ndarray) -> CostModel:
    """The model whose parameters, in the units of the search, are x."""
    if kind == PowerLaw.kind:
        return PowerLaw(float(x[0]), float(x[1] / _TOKEN_SCALE ** x[2]), float(x[2]))
    return FORMS[kind](*(x / _UNITS[: len(x)]).tolist())


def vector_of(model: CostModel) -> np.ndarray:
    """The x of which `model_of` makes this model."""
    x = np.array(list(model.parameters.values()))
    return x * ([1, _TOKEN_SCALE**model.p, 1] if model.kind == PowerLaw.kind else _UNITS[: len(x)])


def _starts(kind: str, steps: TimedSteps) -> list[np.ndarray]:
    """Where the search may begin: solved for some exponents, or for some guesses of which steps are on the floor."""
    if kind == PowerLaw.kind:
        return [_alternate(kind, steps, np.array([0.0, 1.0, p])) for p in np.arange(1.0, 2.6, 0.25)]
    if kind == Additive.kind:
        return [_alternate(kind, steps, np.array([0.0, 0.0, 1.0, 1.0]))]
    seconds, starts = steps.seconds / steps.batch_size.shape[1], []
    floors = np.outer(np.quantile(seconds, [0.0, 0.1, 0.25, 0.5]), [0.9, 1.3]).ravel()
    for linear, quadratic in ((1.0, 0.0), (1.0, 1.0), (0.0, 1.0)):
        tokens = steps.tokens / _TOKEN_SCALE
        work = (steps.batch_size * (linear * tokens + quadratic * tokens**2)).max(axis=2).mean(axis=1)
        rate = np.quantile(seconds / work, 0.25)
        starts += [np.array([floor, 0.0, rate * linear, rate * quadratic, 0.0]) for floor in floors]
    return [_alternate(kind, steps, x) for x in starts]


def _alternate(kind: str, steps: TimedSteps, x: np.ndarray) -> np.ndarray:
    """Robust non-negative least squares, in turn with who is the slowest rank and which micro-steps are on the floor.

    With those (and a power law's exponent) held, seconds are linear in the parameters.
    """
    from scipy.optimize import nnls

    weights = np.ones(len(steps.seconds))
    for _ in range(12):
        matrix = _columns(kind, steps, x) / steps.seconds[:, None]
        found = nnls(matrix * weights[:, None], weights)[0]
        x = np.append(found, x[2]) if kind == PowerLaw.kind else found
        off = np.abs(matrix @ found - 1)
        # The weights of the Cauchy loss.
        weights = (1 + (off / max(LEAST_RESIDUAL_SCALE, float(np.median(off)))) ** 2) ** -0.5
    return x


def _columns(kind: str, steps: TimedSteps, x: np.ndarray) -> np.ndarray:
    """What each linear parameter is multiplied by, float64 [steps, parameters]."""
    model = model_of(kind, x)
    work = steps.batch_size * model.seconds_per_sample(steps.tokens)
    slowest = np.arange(work.shape[0])[:, None], np.arange(work.shape[1]), work.argmax(axis=2)
    batch, tokens, work = (array[slowest] for array in (steps.batch_size, steps.tokens / _TOKEN_SCALE, work))
    if kind == PowerLaw.kind:
        columns = [np.ones_like(batch), batch * tokens ** x[2]]
    else:
        columns = [np.ones_like(batch), batch, batch * tokens, batch * tokens**2]
    if kind == Roofline.kind:
        above = model.a + work > model.floor
        columns = [~above, *(above * column for column in columns[1:]), above]
    return np.stack(columns, axis=2).sum(axis=1, dtype=np.float64)


def minimise(kind: str, steps: TimedSteps, start: np.ndarray, scale: float):
    """The parameters with the least Cauchy loss of the relative errors near `start`, and that loss."""
    from scipy.optimize import least_squares

    def residuals(x):
        return steps.predict(model_of(kind, x)) / steps.seconds - 1

    # No exponent on steps that tell nothing about it may run off to where S**p overflows.
    highest = [np.inf, np.inf, _HIGHEST_EXPONENT] if kind == PowerLaw.kind else np.inf
    return least_squares(residuals, start, bounds=(0, highest), loss="cauchy", f_scale=scale)


def fit_form(kind: str, steps: TimedSteps) -> CostModel:
    """The best parameters of one form, whatever step is a stray."""
    # A loss that grows only with the logarithm beyond the errors that are usual here: so strays do not bend the
    # slope, and a form that fits nowhere is not fitted to a few points alone.
    starts = _starts(kind, steps)
    errors = np.stack([relative_errors(model_of(kind, x), steps) for x in starts])
    scale = max(LEAST_RESIDUAL_SCALE, float(np.median(errors, axis=1).min()))
    losses = np.log1p((errors / scale) ** 2).sum(axis=1)
    best = [starts[i] for i in np.argsort(losses, kind="stable")[:_STARTS_KEPT]]
    return model_of(kind, min((minimise(kind, steps, x, scale) for x in best), key=lambda found: found.cost).x)
