"""Predicted times add up, and the comparison separates batch sizes from dealing."""

from functools import partial
from itertools import product

import numpy as np
import pytest
from support.bucketed import COST, SHAPES, fixed_plan, mixed_index, real

from adaptiveload_hf.buckets.cost import MemoryModel, PowerLaw, Roofline
from adaptiveload_hf.buckets.plan import make_plan
from adaptiveload_hf.buckets.schedule import schedule_epoch
from adaptiveload_hf.buckets.shapes import LatentShape
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


COMPARED = dict(zip(SHAPES, (4000, 900, 300, 200, 100, 60)))


@pytest.fixture(scope="module")
def rows():
    plan = partial(make_plan, COMPARED, COST, MemoryModel(0.0, 1e-3), memory_limit_gib=0.7)
    return compare(plan, COST, balances=("none", "step", "window:8"), world_sizes=(4, 8), accumulations=(1, 4))


def test_every_policy_is_compared_with_every_balance_on_every_number_of_ranks_and_micro_steps(rows):
    found = [(row.world_size, row.gradient_accumulation_steps, row.policy, row.balance) for row in rows]
    assert found == list(product((4, 8), (1, 4), ("equal_token", "dual"), ("none", "step", "window:8")))
    for row in rows:
        assert row.simulation.samples_per_second * row.simulation.epoch_seconds == pytest.approx(
            sum(COMPARED.values())
        )


def test_what_batch_sizes_bring_and_what_dealing_brings_multiply_to_the_gain(rows):
    index = np.repeat(np.arange(len(COMPARED)), list(COMPARED.values()))
    tokens = {row[2:4]: row.simulation.epoch_seconds for row in rows if row[:2] == ("equal_token", "none")}
    for row in rows:
        run = {"world_size": row.world_size, "gradient_accumulation_steps": row.gradient_accumulation_steps}
        token, random = tokens[row[2:4]], simulate(schedule_epoch(index, row.plan, COST, balance="none", **run))
        random = random.epoch_seconds
        assert row.from_batch_sizes == pytest.approx(token / random)
        assert row.from_dealing == pytest.approx(random / row.simulation.epoch_seconds)
        assert row.gain == pytest.approx(token / row.simulation.epoch_seconds)
        # Inside one micro-step there is nothing to deal.
        dealt = row.balance == "window:8" or (row.balance == "step" and row.gradient_accumulation_steps > 1)
        assert (row.from_dealing > 1) == dealt
        assert row.from_batch_sizes == 1 or row.policy == "dual"
    assert min(row.from_dealing for row in rows if row.balance == "window:8") > 1.03
    assert max(row.gain for row in rows) == max(row.gain for row in rows if row.policy == "dual")


def test_each_row_is_planned_for_its_own_dealing(rows):
    assert {(row.balance, row.plan.balance) for row in rows} == {(b, b) for b in ("none", "step", "window:8")}


def test_a_baseline_that_is_not_shown_still_measures_the_gain():
    plan = partial(make_plan, COMPARED, COST, MemoryModel(0.0, 1e-3), memory_limit_gib=0.7)
    (row,) = compare(plan, COST, policies=["dual"], balances=["step"], world_sizes=[4])
    assert row.from_batch_sizes != 1
    (own,) = compare(plan, COST, policies=["dual"], balances=["step"], world_sizes=[4], baseline="dual")
    assert own.from_batch_sizes == 1 and own.from_dealing == row.from_dealing


def test_a_mode_that_auto_chose_too_is_shown_once():
    plan = partial(make_plan, COMPARED, COST)
    (row,) = compare(plan, COST, policies=["dual"], balances=["none", "auto"], world_sizes=[1])[1:]
    assert row.balance == "step"
    assert len(compare(plan, COST, policies=["dual"], balances=["step", "auto"], world_sizes=[1])) == 1


def test_a_billion_samples_are_compared_as_a_small_epoch_of_the_same_mix():
    def gains(times):
        counts = {shape: times * count for shape, count in COMPARED.items()}
        plan = partial(make_plan, counts, COST, MemoryModel(0.0, 1e-3), memory_limit_gib=0.7)
        return compare(plan, COST, policies=["dual"], balances=["step"], world_sizes=[4])[0]

    large, small = gains(300_000), gains(50)
    assert large.gain == pytest.approx(small.gain, rel=0.01)
    assert large.simulation.epoch_seconds == pytest.approx(6000 * small.simulation.epoch_seconds, rel=0.01)
    assert large.simulation.samples_per_second == pytest.approx(small.simulation.samples_per_second, rel=0.01)


def test_where_memory_holds_one_longest_sample_only_dealing_helps_and_the_plan_says_so():
    shapes = [LatentShape(f, *size) for size in ((32, 32), (60, 104), (90, 160)) for f in (1, 5, 9, 13, 17, 21)]
    percent = (30, 5, 5, 4, 3, 3, 15, 8, 7, 5, 4, 3, 3, 2, 1, 1, 0.5, 0.5)
    cost, longest = Roofline(0.4517, 0.0, 0.3178e-4, 0.1515e-8), 21 * 45 * 80
    plan = partial(make_plan, {s: int(1000 * p) for s, p in zip(shapes, percent)}, cost, m_mem_tokens=longest)
    none, step, auto = compare(plan, cost, policies=["dual"], world_sizes=[64])
    token = plan(policy="equal_token", world_size=64)
    assert none.plan.findings[1].startswith("Inert: ") and "Only balancing evens the load" in none.plan.findings[1]
    assert [bucket.batch_size for bucket in none.plan.buckets] == [bucket.batch_size for bucket in token.buckets]
    assert (none.gain, step.gain, auto.from_batch_sizes) == (1, 1, 1)
    assert auto.gain > 2.1 and auto.simulation.balance_efficiency > 0.88
