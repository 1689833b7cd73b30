"""Which micro-batches does dealing put side by side, and which micro-steps make an optimizer step?"""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptiveload_hf.buckets.cost import PowerLaw
from adaptiveload_hf.buckets.deal import best_balance, cut_evenly, deal, matched_efficiency, stratify

WORLD_SIZE, ACCUMULATION = 3, 4
GROUP = WORLD_SIZE * ACCUMULATION


def dealt(optimizer_steps, balance):
    """cost and tokens, [optimizer steps, K, W], of random micro-batches in dealt order."""
    random = np.random.default_rng(optimizer_steps)
    cost, tokens = random.random(optimizer_steps * GROUP), random.integers(1, 10**6, optimizer_steps * GROUP)
    order = deal(cost, tokens, WORLD_SIZE, ACCUMULATION, balance, random)
    assert sorted(order) == list(range(len(cost)))
    shape = (optimizer_steps, ACCUMULATION, WORLD_SIZE)
    return cost[order].reshape(shape), tokens[order].reshape(shape)


# 10 optimizer steps: two windows of 4 and one of 2.
WINDOWS = [("step", [slice(i, i + 1) for i in range(10)]), ("window:4", [slice(0, 4), slice(4, 8), slice(8, 10)])]


@pytest.mark.parametrize(("balance", "windows"), WINDOWS)
def test_a_micro_step_holds_neighbours_in_cost(balance, windows):
    cost, _ = dealt(10, balance)
    for window in windows:
        by_micro_step = np.sort(cost[window].reshape(-1, WORLD_SIZE), axis=1)
        assert np.array_equal(np.sort(by_micro_step, axis=0).reshape(-1), np.sort(cost[window], axis=None))


@pytest.mark.parametrize(("balance", "windows"), WINDOWS)
def test_an_optimizer_step_takes_one_micro_step_of_each_part_of_its_window_by_tokens(balance, windows):
    _, tokens = dealt(10, balance)
    for window in windows:
        micro_steps = tokens[window].sum(axis=2)
        rank = micro_steps.reshape(-1).argsort().argsort().reshape(micro_steps.shape)
        parts = np.sort(rank // len(micro_steps), axis=1)
        assert np.array_equal(parts, np.broadcast_to(np.arange(ACCUMULATION), parts.shape))


def test_places_inside_a_window_are_drawn_at_random():
    _, tokens = dealt(4000, "window:2")
    most = tokens.sum(axis=2).reshape(-1, 2 * ACCUMULATION).argmax(axis=1)
    counts = np.bincount(most, minlength=2 * ACCUMULATION)
    assert counts.min() > 190 and counts.max() < 310


def test_a_window_of_more_than_the_epoch_is_the_epoch():
    arrays = np.arange(24.0), np.arange(24)
    orders = [deal(*arrays, 4, 2, balance, np.random.default_rng(0)) for balance in ("window:3", f"window:{10**30}")]
    assert (orders[0] == orders[1]).all()


LEVELS = ((2.3,), (1.6, 1.5, 1.4), (1.0, 0.9, 0.85), (0.6, 0.55))


def drawn(optimizer_steps, world_size, accumulation, window=16, seed=3):
    """cost, [optimizer steps, W*K], of stratified micro-batches of four levels in unequal numbers."""
    random = np.random.default_rng(seed)
    kinds, share = np.concatenate(LEVELS), np.array([0.12, 0.2, 0.05, 0.01, 0.22, 0.2, 0.1, 0.06, 0.04])
    cost = random.choice(kinds, optimizer_steps * world_size * accumulation, p=share)
    order = stratify(cost, world_size, accumulation, window, random)
    assert sorted(order) == list(range(len(cost)))
    return cost[order].reshape(optimizer_steps, -1)


@settings(max_examples=100, deadline=None)
@given(*[st.integers(1, most) for most in (40, 9, 6, 18)], st.integers(0, 99))
def test_a_stratified_step_takes_of_each_level_its_share_rounded_to_whole_micro_steps(
    optimizer_steps, world_size, accumulation, window, seed
):
    cost = drawn(optimizer_steps, world_size, accumulation, window, seed)
    for steps in np.split(cost, range(window, optimizer_steps, window)):
        for level in LEVELS:
            share = (steps >= min(level)).sum() / len(steps) / world_size
            taken = (steps >= min(level)).sum(axis=1) / world_size
            assert np.floor(share) <= taken.min() and taken.max() <= np.ceil(share)


def test_a_stratified_step_mixes_the_kinds_of_a_level_as_its_window_does():
    cost = drawn(48, 8, 4)
    for steps in np.split(cost, 3):
        inside = np.array([(steps == kind).sum(axis=1) for kind in LEVELS[2]])
        expected = inside.sum(axis=0) * inside.sum(axis=1, keepdims=True) / inside.sum()
        assert np.abs(inside - expected).max() <= 1.5  # drawn at random: up to five


def test_stratified_steps_come_in_random_order():
    cost = drawn(16 * 200, 2, 2).sum(axis=1).reshape(200, 16)
    assert np.bincount(cost.argmax(axis=1), minlength=16).max() < 35


def test_stratifying_thousands_of_kinds_counts_a_few_windows_at_once():
    kinds = 4096
    cost = np.random.default_rng(0).permutation(np.repeat(np.arange(1.0, kinds + 1), 8))
    tracemalloc.start()
    try:
        drawn = stratify(cost, 2, 2, 2, np.random.default_rng(0))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(np.sort(drawn), np.arange(len(cost)))
    assert most < 64 << 20  # 4,096 windows times as many kinds take 128 MiB in each of several arrays


def test_stratified_waits_less_than_step_and_holds_more_kinds_than_a_window_that_waits_more():
    random = np.random.default_rng(0)
    cost = random.choice([2.3, 1.62, 1.18, 1.07, 1.02, 0.84, 0.8, 0.78], 64 * 32)
    modes = ("step", "stratified:16", "window:2")
    step, ours, window = (
        np.mean([len(set(step)) for step in cost[deal(cost, cost, 8, 4, mode, random)].reshape(64, -1)])
        for mode in modes
    )
    assert step > ours > 1.05 * window
    step, ours, window = (matched_efficiency(cost, 8, 4, mode) for mode in modes)
    assert ours > 1.05 * step and ours > window


def test_none_leaves_the_order_as_it_is():
    cost, _ = dealt(5, "none")
    assert np.array_equal(cost.reshape(-1), np.random.default_rng(5).random(5 * GROUP))


@pytest.mark.parametrize(
    ("pair", "step", "window", "chosen"),
    [
        ((0.91, 0.82), 0.950, 0.955, "step"),  # step reaches 0.95 itself
        ((0.912, 0.81), 0.947, 0.953, "step"),  # and here comes within 1% of a window that does
        ((0.93, 0.83), 0.948, 0.963, "window:2"),
        ((0.901, 0.6), 0.895, 0.895, "step"),  # nothing reaches it
        ((0.93, 0.6), 0.889, 0.903, "window:2"),
    ],
)
def test_auto_takes_a_window_only_where_it_saves_more_than_one_percent(pair, step, window, chosen):
    optimizer_steps = 16  # windows of over two would be more than an eighth of the epoch
    cost = np.tile([1.0, 0.9, *pair], optimizer_steps // 2)
    assert matched_efficiency(cost, 2, 1, "step") == pytest.approx(step, abs=1e-3)
    assert matched_efficiency(cost, 2, 1, "window:2") == pytest.approx(window, abs=1e-3)
    assert best_balance(cost, 2, 1, optimizer_steps)[0] == chosen


def test_a_bucket_that_was_one_huge_micro_batch_is_cut_without_a_turn_for_each_sample():
    asked = []

    class Counted(PowerLaw):
        def seconds(self, batch_size, tokens):
            asked.append(batch_size)
            return super().seconds(batch_size, tokens)

    one = np.array([10**6])
    numbers, missing = cut_evenly(one, one, np.array([1560]), Counted(0.0, 1e-6, 1.1), 64)
    assert (numbers.tolist(), missing) == ([64], 0)
    assert len(asked) <= 64
