"""Into which micro-batches is a bucket cut, and which of them run side by side?"""

from __future__ import annotations

import heapq
import re
from numbers import Integral

import numpy as np

from ..errors import UserError
from .cost import CostModel

_SPANS = (2, 4, 8, 16)
# From the most even optimizer steps to the least.
AUTO = ("step", *(f"stratified:{n}" for n in _SPANS), *(f"window:{n}" for n in _SPANS))
_AUTO_EFFICIENCY = 0.95
# A larger window must be predicted to make an epoch shorter by more than this factor: optimizer steps that are drawn
# at random are worth more than a last percent of speed.
WORTH_A_WINDOW = 1.01
# Micro-batches of a window are sorted by cost: one that is most of an epoch would sort most of the epoch. Windows of
# a fifth raised the held-out loss by 0.8%, outside seed noise; of an eighth they stayed within it (docs/balance.md).
_WINDOWS_OF_AN_EPOCH = 8
# Costs that differ by up to a fifth make a level of "stratified:n": of smaller levels an optimizer step holds fewer,
# in larger ones ranks wait more (docs/balance.md).
_ALIKE = 0.2
# Enough micro-batches to tell the windows apart: sorting all of a large epoch five times would cost seconds.
_EXCERPT = 1 << 15
# Stratifying is 20 times as much work as sorting, and every step of it is alike.
_STRATIFIED_EXCERPT = 1 << 13
# Windows times kinds of micro-batches that are counted at once: of thousands of shapes, all would take gigabytes.
_CELLS = 1 << 20


def check_ranks(world_size: int, gradient_accumulation_steps: int) -> None:
    """
    Raises:
        UserError: W or K is no whole number from 1 on.
    """
    run = (world_size, gradient_accumulation_steps)
    if not all(isinstance(number, Integral) and number >= 1 for number in run):
        raise UserError(
            "world_size and gradient_accumulation_steps must be at least 1 and whole, but found "
            f"{run[0]!r} and {run[1]!r}."
        )


def check_balance(balance: str) -> None:
    """
    Raises:
        UserError: no such balance mode.
    """
    if balance != "auto":
        window_of(balance)


def window_of(balance: str) -> int:
    """Optimizer steps between which micro-batches are exchanged; 1: none are, 0: nor between micro-steps.

    Raises:
        UserError: no such balance mode.
    """
    if balance in ("none", "step"):
        return int(balance == "step")
    if not isinstance(balance, str) or not re.fullmatch(r"(stratified|window):[1-9]\d*", balance):
        raise UserError(
            f"balance is none, step, stratified:n (such as stratified:8), window:n or auto, but found {balance!r}."
        )
    return int(balance.partition(":")[2])


def is_wide(balance: str, optimizer_steps: int) -> bool:
    """Whether the mode sorts more than an eighth of an epoch's optimizer steps together."""
    window = window_of(balance)
    return not _is_stratified(balance) and window > 1 and window * _WINDOWS_OF_AN_EPOCH > optimizer_steps


def _is_stratified(balance: str) -> bool:
    return balance.startswith("stratified:")


def cut_evenly(
    counts: np.ndarray, batch_sizes: np.ndarray, tokens: np.ndarray, cost: CostModel, group: int
) -> tuple[np.ndarray, int]:
    """Into how many micro-batches, whose sizes differ by at most 1, each bucket is cut.

    At least ceil(count / B); more where a micro-batch costs most and holds several samples, until the total is a
    multiple of `group`.

    Args:
        counts, batch_sizes, tokens: int [buckets].
        group: W*K.

    Returns:
        The numbers, int64 [buckets], and how many micro-batches are still missing when every one holds one sample.
    """
    numbers = -(-counts // batch_sizes)
    missing = int(-numbers.sum() % group)
    sizes = -(-counts // np.maximum(numbers, 1))
    several = np.flatnonzero(sizes > 1)
    columns = -cost.seconds(sizes, tokens), -tokens, np.arange(len(sizes)), sizes
    heap = list(zip(*(column[several].tolist() for column in columns)))
    heapq.heapify(heap)
    while missing and heap:
        *_, i, size = heapq.heappop(heap)
        # It stays the costliest until its largest micro-batch is smaller.
        more = min(missing, -(-int(counts[i]) // (size - 1)) - int(numbers[i]))
        numbers[i] += more
        missing -= more
        size = -(-int(counts[i]) // int(numbers[i]))
        if size > 1:
            heapq.heappush(heap, (-float(cost.seconds(size, tokens[i])), -int(tokens[i]), i, size))
    return numbers, missing


def _blocks(cost: np.ndarray, length: int) -> list[tuple[int, np.ndarray]]:
    """The whole windows, [windows, length], and the shorter one that is left, each with where it begins."""
    length = min(length, len(cost))
    whole = len(cost) // length * length
    blocks = [(0, cost[:whole].reshape(-1, length)), (whole, cost[whole:].reshape(1, -1))]
    return [(first, block) for first, block in blocks if block.size]


def deal(
    cost: np.ndarray,
    tokens: np.ndarray,
    world_size: int,
    gradient_accumulation_steps: int,
    balance: str,
    random: np.random.Generator,
) -> np.ndarray:
    """The order that puts W neighbours in cost on the W ranks of a micro-step.

    Args:
        cost: float64 [micro-batches], shuffled; a multiple of W*K.
        tokens: int64 [micro-batches], B*S of each.
        balance: none | step | stratified:n | window:n.

    Returns:
        int64 [micro-batches], positions in cost.
    """
    window = window_of(balance)
    if window == 0:
        return np.arange(len(cost))
    if _is_stratified(balance):
        drawn = stratify(cost, world_size, gradient_accumulation_steps, window, random)
        return drawn[deal(cost[drawn], tokens[drawn], world_size, gradient_accumulation_steps, "step", random)]
    parts = []
    for first, block in _blocks(cost, window * world_size * gradient_accumulation_steps):
        # Stable: what an unstable sort does with equal costs differs from CPU to CPU, and ranks must agree.
        order = np.argsort(block, axis=1, kind="stable").reshape(len(block), -1, world_size)
        random.permuted(order, axis=2, out=order)
        order += first + block.shape[1] * np.arange(len(block))[:, None, None]
        mixed = _mix(tokens[order].sum(axis=2), gradient_accumulation_steps, random)
        parts.append(np.take_along_axis(order, mixed[:, :, None], axis=1).reshape(-1))
    return np.concatenate(parts)


def stratify(
    cost: np.ndarray, world_size: int, gradient_accumulation_steps: int, window: int, random: np.random.Generator
) -> np.ndarray:
    """The order in which every W*K neighbours, an optimizer step, are a stratified sample of their window.

    Costs that are nearly alike make a level, a stratum. An optimizer step takes of each level its share, rounded up or
    down to whole micro-steps, so that few ranks wait; inside a level the kinds of micro-batches are evenly spread.

    Args:
        cost: float64 [micro-batches], shuffled; a multiple of W*K. Those of equal cost count as of one kind.
        window: optimizer steps that share what they hold together.

    Returns:
        int64 [micro-batches], positions in cost.
    """
    # 16-bit numbers: those numpy sorts by radix, stably, in a tenth of the time that others take.
    kinds, kind_of = np.unique(cost, return_inverse=True)
    levels, dearest = np.zeros(len(kinds), dtype=np.uint16), kinds[-1]
    for kind in range(len(kinds) - 2, -1, -1):
        begins = kinds[kind] < (1 - _ALIKE) * dearest
        dearest = kinds[kind] if begins else dearest
        levels[kind] = levels[kind + 1] + begins
    parts = []
    kind_of = kind_of.astype(np.min_scalar_type(len(kinds)))
    windows_at_once = max(1, _CELLS // len(kinds))
    for first, block in _blocks(kind_of, window * world_size * gradient_accumulation_steps):
        windows, length = block.shape
        begins = range(0, windows, windows_at_once)
        order = [length * i + _spread(block[i : i + windows_at_once], levels, random) for i in begins]
        # Each optimizer step takes the micro-steps at the same place of K equal parts: of a level, its share.
        steps = np.concatenate(order).reshape(windows, gradient_accumulation_steps, -1, world_size).swapaxes(1, 2)
        shuffled = random.permuted(np.broadcast_to(np.arange(steps.shape[1]), steps.shape[:2]), axis=1)
        parts.append(first + steps[np.arange(windows)[:, None], shuffled].reshape(-1))
    return np.concatenate(parts)


def _spread(block: np.ndarray, levels: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The order that has each window's levels one after the other, and in each its kinds evenly spread.

    Args:
        block: [windows, length], kinds. levels: uint16 [kinds].

    Returns:
        int64, same shape, positions in the flat block.
    """
    windows, length = block.shape
    row = np.arange(windows)[:, None]
    in_row = length * row
    order = np.argsort(block, axis=1, kind="stable") + in_row
    kind = block.take(order)
    cell = len(levels) * row + kind
    numbers = np.bincount(cell.ravel(), minlength=windows * len(levels)).reshape(windows, -1)
    place = np.arange(length) - (np.cumsum(numbers, axis=1) - numbers).take(cell)
    evenly = (place + random.random(numbers.size).take(cell)) / numbers.take(cell)
    evenly = np.argsort((evenly * (1 << 16)).astype(np.uint16), axis=1, kind="stable") + in_row
    level = levels.take(kind.take(evenly))
    return order.take(evenly.take(np.argsort(level, axis=1, kind="stable") + in_row))


def _mix(tokens: np.ndarray, gradient_accumulation_steps: int, random: np.random.Generator) -> np.ndarray:
    """The order of the micro-steps of each window: an optimizer step takes one of every K-th part of them by tokens.

    Drawn at random instead, optimizer steps of a window would differ more in tokens, and a loss that is divided by
    the tokens of a step would favour what is in the small ones (docs/balance.md has numbers).

    Args:
        tokens: int64 [windows, micro-steps of a window].

    Returns:
        int64, same shape, positions in the window.
    """
    parts = np.argsort(tokens, axis=1, kind="stable").reshape(len(tokens), gradient_accumulation_steps, -1)
    random.permuted(parts, axis=2, out=parts)
    steps = np.ascontiguousarray(parts.transpose(0, 2, 1))
    random.permuted(steps, axis=2, out=steps)
    return steps.reshape(tokens.shape)


def mean_slowest(seconds: np.ndarray, numbers: np.ndarray, world_size: int) -> float:
    """The slowest of W micro-batches that meet at random, on average over all ways they can.

    Args:
        seconds, numbers: cost of each kind of micro-batch and how many there are, at least W in all.
    """
    order = np.argsort(seconds)
    reached = np.cumsum(numbers[order])
    likely = (reached / reached[-1]) ** world_size > 1e-12
    # The i-th rank's is among the n no slower than a kind, if those before it are, with chance (n - i) / (all - i).
    left = reached[likely, None] - np.arange(world_size)
    none_slower = np.prod(np.maximum(left, 0) / left[-1], axis=1)
    return float(seconds[order[likely]] @ np.diff(none_slower, prepend=0.0))


def matched_efficiency(cost: np.ndarray, world_size: int, gradient_accumulation_steps: int, balance: str) -> float:
    """Balance efficiency of micro-batches that are dealt in this mode, which is not none.

    Args:
        cost: float64 [micro-batches], shuffled; a multiple of W*K.
    """
    window = window_of(balance)
    if _is_stratified(balance):
        cost = cost[stratify(cost, world_size, gradient_accumulation_steps, window, np.random.default_rng(0))]
        window = 1
    blocks = _blocks(cost, window * world_size * gradient_accumulation_steps)
    slowest = sum(np.sort(block, axis=1)[:, world_size - 1 :: world_size].sum() for _, block in blocks)
    return float(cost.sum() / world_size / slowest)


def best_balance(
    cost: np.ndarray, world_size: int, gradient_accumulation_steps: int, optimizer_steps: int
) -> tuple[str, float]:
    """The first of AUTO whose balance efficiency reaches 0.95, else the best of them; or an earlier one that makes an
    epoch at most 1% longer.

    Args:
        cost: float64 [micro-batches], shuffled; a multiple of W*K. Judged by an excerpt from its beginning.
        optimizer_steps: of the epoch; windows that are wide for it are not chosen.

    Returns:
        The mode and its efficiency.
    """
    group = world_size * gradient_accumulation_steps
    largest = window_of(AUTO[-1]) * group
    cost = cost[: largest * -(-_EXCERPT // largest)]
    found = []
    for balance in AUTO:
        # With K = 1 an optimizer step is one micro-step, so it can hold one level only: that is a window.
        one_level = _is_stratified(balance) and gradient_accumulation_steps == 1
        if one_level or is_wide(balance, optimizer_steps):
            continue
        span = window_of(balance) * group
        part = cost[: span * -(-_STRATIFIED_EXCERPT // span)] if _is_stratified(balance) else cost
        found.append((balance, matched_efficiency(part, world_size, gradient_accumulation_steps, balance)))
        if found[-1][1] >= _AUTO_EFFICIENCY:
            break
    best = max(efficiency for _, efficiency in found)
    return next(mode for mode in found if mode[1] * WORTH_A_WINDOW >= best)
