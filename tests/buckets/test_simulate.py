"""Predicted times add up, and the comparison separates batch sizes from dealing."""

import numpy as np
import pytest
from support.bucketed import COST, SHAPES, fixed_plan, mixed_index, real

from adaptiveload_hf.buckets.cost import MemoryModel, PowerLaw
from adaptiveload_hf.buckets.schedule import schedule_epoch
from adaptiveload_hf.buckets.simulate import compare, shape_weights, simulate

COUNTS, BATCH_SIZES = (400, 90, 61, 30, 9), (16, 8, 4, 2, 1)


def schedule(balance="none", world_size=4, loss_normalization="token"):
    plan = fixed_plan(COUNTS, BATCH_SIZES, world_size, 2)
    return schedule_epoch(
        mixed_index(COUNTS).bucket_of_sample,
        plan,
        COST,
        world_size=world_size,
        gradient_accumulation_steps=2,
        balance=balance,
        loss_normalization=loss_normalization,
    )


def test_an_epoch_lasts_as_long_as_its_slowest_ranks():
    dealt = schedule()
    found = simulate(dealt)
    slowest = mean = 0.0
    samples = tokens = 0
    cvs = []
    for micro_step in range(dealt.num_micro_steps):
        seconds = []
        for rank in range(4):
            batch = dealt.micro_batch(micro_step, rank)
            one = dealt.tokens[micro_step * 4 + rank]
            seconds.append(float(COST.seconds(len(batch), one)))
            samples += len(batch)
            tokens += len(batch) * one
        slowest += max(seconds)
        mean += sum(seconds) / 4
        cvs.append(np.std(seconds) / np.mean(seconds))
    assert found.epoch_seconds == pytest.approx(slowest)
    assert found.ideal_seconds == pytest.approx(mean)
    assert found.balance_efficiency == pytest.approx(mean / slowest)
    assert found.step_cv == pytest.approx(np.mean(cvs))
    assert found.compute_cv == pytest.approx(np.std(dealt.cost) / np.mean(dealt.cost))
    assert found.samples_per_second == pytest.approx(sum(COUNTS) / slowest) == pytest.approx(samples / slowest)
    assert found.tokens_per_second == pytest.approx(tokens / slowest)
    assert found.samples_per_update_step == pytest.approx(sum(COUNTS) / dealt.num_update_steps)


def test_one_rank_is_always_balanced():
    assert simulate(schedule(world_size=1)).balance_efficiency == pytest.approx(1.0)


def test_another_cost_model_shows_what_dealing_by_the_wrong_one_loses():
    plan = fixed_plan(COUNTS, BATCH_SIZES, 4, 2)
    wrong = PowerLaw(0.0, 1e-3, 2.0)
    index, run = mixed_index(COUNTS).bucket_of_sample, {"world_size": 4, "gradient_accumulation_steps": 2}
    by_wrong = simulate(schedule_epoch(index, plan, wrong, balance="step", **run), COST)
    by_right = simulate(schedule_epoch(index, plan, COST, balance="step", **run), COST)
    assert by_wrong.balance_efficiency < by_right.balance_efficiency


def test_padding_counts_as_time_but_not_as_samples():
    plan = fixed_plan((10,), (1,), 4, 2)
    padded = schedule_epoch(np.zeros(10, int), plan, COST, world_size=4, gradient_accumulation_steps=2)
    assert (~real(padded)).sum() == 6
    found = simulate(padded)
    assert found.samples_per_second * found.epoch_seconds == pytest.approx(10)


@pytest.mark.parametrize("normalization", ["token", "sample", "none"])
def test_the_weight_of_a_shape_is_its_share_of_all_gradients(normalization):
    dealt = schedule(loss_normalization=normalization)
    shares = np.zeros(len(COUNTS))
    for update in range(dealt.num_update_steps):
        for j in range(update * 8, update * 8 + 8):  # W*K = 8
            shares[dealt.bucket[j]] += dealt.loss_weight[j] / 8 / dealt.num_update_steps
    np.testing.assert_allclose(shape_weights(dealt), shares)
    if normalization == "sample":
        np.testing.assert_allclose(shares, np.array(COUNTS) / sum(COUNTS))


def test_padding_weighs_nothing():
    plan = fixed_plan((3, 0, 7), (1, 1, 1), 4, 2)
    index = np.repeat([0, 2], [3, 7])
    for normalization in ("sample", "none"):
        dealt = schedule_epoch(
            index, plan, COST, world_size=4, gradient_accumulation_steps=2, loss_normalization=normalization
        )
        np.testing.assert_allclose(shape_weights(dealt), [0.3, 0, 0.7])


def test_the_comparison_shows_batch_sizes_and_dealing_apart():
    counts = dict(zip(SHAPES, (4000, 900, 300, 200, 100, 60)))
    rows = compare(
        counts, COST, MemoryModel(0.0, 1e-3), memory_limit_gib=0.7, world_size=4, gradient_accumulation_steps=4
    )
    assert [row.policy for row in rows] == ["equal_token"] * 2 + ["dual"] * 3
    assert [rows[i].balance for i in (0, 2, 3)] == ["none", "none", "step"]
    assert rows[1].balance not in ("none", "auto") and rows[4].balance not in ("none", "auto")
    token, dealt_token, dual, step, auto = (row.simulation for row in rows)
    assert dealt_token.epoch_seconds < token.epoch_seconds
    assert auto.epoch_seconds <= step.epoch_seconds < dual.epoch_seconds < token.epoch_seconds
    for row in rows:
        assert row.simulation.samples_per_second * row.simulation.epoch_seconds == pytest.approx(sum(counts.values()))
