"""Batch sizes obey their limits, and what a limit does to the run is said."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptiveload_hf.buckets.cost import Additive, FlopCount, MemoryModel, PowerLaw, Roofline
from adaptiveload_hf.buckets.plan import BucketPlan, dual_constraint_batch_size, make_plan
from adaptiveload_hf.buckets.schedule import schedule_epoch
from adaptiveload_hf.buckets.shapes import LatentShape, TokenGeometry
from adaptiveload_hf.errors import UserError

COST = Roofline(0.45, 0.0, 3.2e-5, 1.5e-9)
MEMORY = MemoryModel(2.0, 1e-4)
COUNTS = {LatentShape(1, 32, 32): 900, LatentShape(5, 60, 104): 60, LatentShape(21, 60, 104): 30}
MANY = {LatentShape(f, 60, 104): n for f, n in ((1, 4000), (5, 900), (9, 500), (21, 300))}
RUN = {"world_size": 2, "gradient_accumulation_steps": 2}


def plan(counts=COUNTS, cost=COST, memory=MEMORY, memory_limit_gib=8.6, **options):
    limit = None if memory is None else memory_limit_gib
    return make_plan(counts, cost, memory, memory_limit_gib=limit, **{**RUN, **options})


def sizes(made):
    return {str(bucket.shape): bucket.batch_size for bucket in made.buckets}


@given(
    tokens=st.integers(1, 200_000),
    m_mem=st.floats(1, 1e7),
    m_comp=st.floats(1, 1e12),
    p=st.floats(1, 2.2),
)
def test_the_dual_constraint_is_the_papers_formula(tokens, m_mem, m_comp, p):
    expected = max(1, min(math.floor(m_mem / tokens), math.floor(m_comp / tokens**p)))
    assert dual_constraint_batch_size(tokens, m_mem=m_mem, m_comp=m_comp, p=p) == expected


def test_the_dual_constraint_on_numbers_worked_out_by_hand():
    assert dual_constraint_batch_size(1000, m_mem=10_500, m_comp=4.2e6, p=2.0) == 4
    assert dual_constraint_batch_size(1000, m_mem=3_999, m_comp=4.2e6, p=2.0) == 3
    assert dual_constraint_batch_size(9000, m_mem=3_999, m_comp=4.2e6, p=2.0) == 1


def test_with_the_power_law_the_plan_is_the_dual_constraint():
    law = PowerLaw(0.0, 1e-8, 1.6)
    made = plan(cost=law, target_seconds=0.4)
    for bucket in made.buckets:
        expected = dual_constraint_batch_size(bucket.tokens, m_mem=made.m_mem_tokens, m_comp=0.4 / law.b, p=law.p)
        assert bucket.batch_size == expected


@settings(max_examples=60, deadline=None)
@given(limit=st.floats(6, 200), target=st.floats(0.1, 60), policy=st.sampled_from(["dual", "equal_token"]))
def test_no_batch_is_over_a_limit_and_no_larger_one_would_fit(limit, target, policy):
    made = plan(
        MANY, memory_limit_gib=limit, policy=policy, **({"target_seconds": target} if policy == "dual" else {})
    )
    for bucket in made.buckets:
        size = bucket.batch_size
        fits_memory = [b * bucket.tokens <= made.m_mem_tokens for b in (size, size + 1)]
        fits_time = [policy == "equal_token" or COST.seconds(b, bucket.tokens) <= target for b in (size, size + 1)]
        assert bucket.bound_by in {"memory", "compute", "one", "samples"}
        assert 1 <= size <= bucket.count and fits_memory[0]
        assert fits_time[0] or (size == 1 and bucket.bound_by == "one")
        assert (fits_memory[1] and fits_time[1]) == (bucket.bound_by == "samples")
        assert bucket.bound_by != "samples" or size == bucket.count
        assert bucket.seconds == pytest.approx(COST.seconds(size, bucket.tokens))
        assert bucket.gib == pytest.approx(MEMORY.gib(size, bucket.tokens))


def test_bound_by_says_which_limit_set_the_batch_size():
    made = plan(target_seconds=2.0, batch_sizes={"5x60x104": 3})
    assert [bucket.bound_by for bucket in made.buckets] == ["compute", "given", "one"]
    assert plan(target_seconds=60.0).buckets[0].bound_by == "memory"


def test_equal_token_divides_the_budget():
    assert sizes(plan(policy="equal_token", token_budget=33_000)) == {"1x32x32": 128, "5x60x104": 4, "21x60x104": 1}
    assert sizes(plan(policy="equal_token", memory_limit_gib=None))["1x32x32"] == 32760 // 256


def test_equal_time_takes_the_batch_whose_cost_is_nearest_to_the_target():
    made = plan(policy="equal_time", target_seconds=2.5, memory_limit_gib=100.0)
    for bucket in made.buckets:
        off = abs(bucket.seconds - 2.5)
        others = [b for b in (bucket.batch_size - 1, bucket.batch_size + 1) if b >= 1]
        assert all(off <= abs(COST.seconds(b, bucket.tokens) - 2.5) + 1e-12 for b in others)


def test_equal_time_over_the_memory_limit_is_refused():
    with pytest.raises(UserError, match=r"Infeasible under 5.5 GiB: .*1x32x32 at batch size.*\. Lower target_seconds"):
        plan(policy="equal_time", target_seconds=60.0, memory_limit_gib=5.5)


def test_fixed_takes_what_is_given():
    given_sizes = {"1x32x32": 16, LatentShape(5, 60, 104): 2, "21x60x104": 1}
    made = plan(policy="fixed", batch_sizes=given_sizes)
    assert list(sizes(made).values()) == [16, 2, 1]
    assert {bucket.bound_by for bucket in made.buckets} == {"given"}


FEW = {LatentShape(1, 32, 32): 5, LatentShape(5, 60, 104): 200}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"samples_per_step": 10},
        {"policy": "equal_token"},
        {"policy": "equal_time", "target_seconds": 2.5},
        {"policy": "fixed", "batch_sizes": {"1x32x32": 59, "5x60x104": 3}},
        {"memory": None},
        {"cost": Roofline(0.4, 0.0, 0.0, 0.0)},
    ],
)
def test_no_batch_size_is_planned_that_its_bucket_cannot_fill(options):
    few, many = plan(FEW, **options).buckets
    assert (few.batch_size, few.bound_by) == (5, "samples")
    assert few.gib is None or few.gib == MEMORY.gib(5, 256) < many.gib
    assert few.seconds == options.get("cost", COST).seconds(5, 256)


def test_a_batch_size_that_no_bucket_fills_is_not_over_the_memory_limit():
    given_sizes = {"1x32x32": 100_000, "5x60x104": 3}
    assert not any("Over the memory limit" in f for f in plan(FEW, batch_sizes=given_sizes).findings)
    assert any("Over the memory limit: 5x" in f for f in plan(FEW, batch_sizes={"5x60x104": 100_000}).findings)


def test_an_epoch_is_the_same_as_with_larger_batch_sizes_than_its_buckets_fill():
    made = plan(FEW, policy="fixed", batch_sizes={"1x32x32": 59, "5x60x104": 3})
    larger = replace(made, buckets=(replace(made.buckets[0], batch_size=59), made.buckets[1]))
    index = np.repeat([0, 1], list(FEW.values()))
    assert schedule_epoch(index, made, COST, **RUN).digest == schedule_epoch(index, larger, COST, **RUN).digest


def test_given_batch_sizes_are_checked():
    with pytest.raises(UserError, match=r"there is none for 5x60x104, 21x60x104\."):
        plan(policy="fixed", batch_sizes={"1x32x32": 16})
    with pytest.raises(UserError, match=r"no sample has the shape 9x9x9\."):
        plan(batch_sizes={"9x9x9": 1})
    for wrong in (0, 1 << 70):
        with pytest.raises(UserError, match=rf"but 1x32x32 has {wrong}\."):
            plan(batch_sizes={"1x32x32": wrong})


def test_a_given_batch_over_the_memory_limit_is_said():
    assert any("Over the memory limit" in f and "5x60x104" in f for f in plan(batch_sizes={"5x60x104": 50}).findings)


def test_a_shape_that_does_not_fit_alone_is_infeasible():
    with pytest.raises(UserError, match=r"Infeasible under 4.0 GiB: 21x60x104 at batch size 1 needs 5.3 GiB.*shard"):
        plan(memory_limit_gib=4.0)


def test_a_shape_beyond_the_measurements_needs_consent():
    with pytest.raises(UserError, match=r"S = 256 to 30000, but the dataset has 21x60x104 \(S = 32760\)"):
        plan(measured_tokens=(256, 30_000))
    plan(measured_tokens=(256, 30_000), allow_extrapolation=True)
    plan(measured_tokens=(256, 32_760))


def test_too_few_samples_for_an_optimizer_step_are_refused():
    with pytest.raises(UserError, match="8 ranks x 2 micro-steps, but the dataset has 15 samples"):
        plan({LatentShape(1, 32, 32): 15}, world_size=8)


def test_wrong_options_are_refused():
    with pytest.raises(UserError, match="policy is one of dual, equal_token, equal_time, fixed, but found 'duel'"):
        plan(policy="duel")
    for counts in ({}, {"1x32x32": 900}, {LatentShape(1, 32, 32): 900.5}, {LatentShape(1, 32, 32): -1}):
        with pytest.raises(UserError, match=r"shape_counts maps at least one LatentShape, such as .*, but found"):
            plan(counts)
    for limit in (math.nan, -1, 0, "80"):
        with pytest.raises(UserError, match=f"memory_limit_gib is a number .* above 0, .*, but found {limit!r}"):
            plan(memory_limit_gib=limit)
    with pytest.raises(UserError, match=r"batch_sizes is {shape: B} such as .*, but found \[1\]"):
        plan(batch_sizes=[1])
    with pytest.raises(
        UserError,
        match=r"balance is none, step, stratified:n \(such as stratified:8\), window:n or auto, but found 'wide'",
    ):
        plan(balance="wide")
    for run in ({"world_size": 0}, {"world_size": 1.5}, {"gradient_accumulation_steps": "2"}):
        with pytest.raises(UserError, match="must be at least 1 and whole, but found"):
            plan(**run)
    for tokens in (0, -3, 2.5e4, math.nan, "many"):
        for limit in ("m_mem_tokens", "token_budget"):
            with pytest.raises(
                UserError, match=f"tokens is whole and at least 1, or None, but found {limit} = {tokens!r}"
            ):
                plan(memory=None, policy="equal_token", **{limit: tokens})
    for target in (0, -1.0, math.inf, "fast"):
        with pytest.raises(UserError, match="target_seconds is 'auto' or a number above 0"):
            plan(target_seconds=target)


def test_numbers_of_numpy_are_numbers():
    given = {"memory_limit_gib": np.float32(40), "target_seconds": np.float32(3)}
    assert plan(**given) == plan(memory_limit_gib=40.0, target_seconds=3.0)
    assert sizes(plan(samples_per_step=np.int64(20))) == sizes(plan(samples_per_step=20))


def test_a_compute_limit_that_changes_nothing_is_called_inert():
    one_longest = plan(memory_limit_gib=5.3, target_seconds=float(COST.seconds(1, 32760)))
    assert any(finding.startswith("Inert") for finding in one_longest.findings)
    bound = plan(memory_limit_gib=40.0, target_seconds=float(COST.seconds(1, 32760)))
    assert not any(finding.startswith("Inert") for finding in bound.findings)


def test_a_compute_limit_that_costs_throughput_is_called_harmful():
    made = plan(memory_limit_gib=5.3, target_seconds=0.5)
    assert any(finding.startswith("Harmful: the compute limit of 0.5 seconds costs") for finding in made.findings)
    assert not any(finding.startswith("Harmful") for finding in plan().findings)


def test_without_a_memory_limit_the_longest_sample_is_the_target_and_this_is_said():
    made = plan(memory=None)
    assert made.target_seconds == pytest.approx(float(COST.seconds(1, 32760)))
    assert made.m_mem_tokens is None and made.buckets[0].gib is None
    assert made.findings[0].startswith("No memory model or limit")


def test_where_memory_was_not_measured_the_largest_micro_batch_known_to_fit_is_the_limit():
    made = plan(memory=None, m_mem_tokens=70_000)
    assert made.m_mem_tokens == 70_000
    assert max(bucket.batch_size * bucket.tokens for bucket in made.buckets) in range(35_000, 70_001)
    assert made.findings[0] == "Memory was not measured: micro-batches stay within 70000 tokens, known to fit."


def test_the_weight_of_one_longest_clip_is_said():
    made = plan(target_seconds=2.6)
    long, short = made.batch_size_of("21x60x104"), made.batch_size_of("1x32x32")
    assert f"one 21x60x104 weighs as much as {32760 / 256:.1f} of 1x32x32" in made.findings[-1]
    assert f"{short / long:.1f} with 'none'" in made.findings[-1]
    assert not any("In the loss" in finding for finding in plan({LatentShape(5, 60, 104): 60}).findings)


def epoch_seconds(made, cost=COST):
    from adaptiveload_hf.buckets.simulate import simulate

    index = np.repeat(np.arange(len(made.buckets)), [bucket.count for bucket in made.buckets])
    return simulate(schedule_epoch(index, made, cost, **RUN)).epoch_seconds


def test_the_automatic_target_is_as_fast_as_any_tried_by_hand():
    counts = {LatentShape(f, 60, 104): n for f, n in ((1, 4000), (5, 900), (9, 500), (21, 300))}
    auto = epoch_seconds(plan(counts, memory_limit_gib=30.0))
    one = float(COST.seconds(1, 32760))
    for target in (one, 1.3 * one, 2 * one, 4 * one):
        assert auto <= 1.02 * epoch_seconds(plan(counts, memory_limit_gib=30.0, target_seconds=target))


def test_where_every_step_costs_overhead_the_automatic_target_is_above_the_longest_sample():
    cost = Additive(3.0, 0.0, 3.2e-5, 1.5e-9)
    made = plan(cost=cost, memory_limit_gib=60.0)
    assert made.target_seconds > 1.2 * cost.seconds(1, 32760)


def test_steps_that_all_take_the_floor_are_bound_by_memory_or_the_bucket_alone():
    floor = Roofline(0.4, 0.0, 0.0, 0.0)
    assert sizes(plan(cost=floor, memory=None)) == {"1x32x32": 900, "5x60x104": 60, "21x60x104": 30}
    assert sizes(plan(cost=floor))["21x60x104"] == 2


def samples_per_step(made, **run):
    from adaptiveload_hf.buckets.simulate import simulate

    index = np.repeat(np.arange(len(made.buckets)), [bucket.count for bucket in made.buckets])
    return simulate(schedule_epoch(index, made, COST, **{**RUN, **run})).samples_per_update_step


@pytest.mark.parametrize("wanted", [20, 40, 77, 300])
def test_the_samples_of_an_optimizer_step_are_held_near_the_wanted_number(wanted):
    made = plan(MANY, memory_limit_gib=60.0, samples_per_step=wanted)
    assert samples_per_step(made) == pytest.approx(wanted, rel=0.05)
    assert f"{samples_per_step(made):.1f} samples on average; samples_per_step is {wanted}." in " ".join(made.findings)
    assert max(bucket.batch_size * bucket.tokens for bucket in made.buckets) <= made.m_mem_tokens


def test_the_nearest_of_all_targets_is_taken():
    made = plan(MANY, memory_limit_gib=60.0, samples_per_step=33)
    off = abs(samples_per_step(made) - 33)
    for target in np.geomspace(0.4, 20, 40).tolist():
        assert off <= abs(samples_per_step(plan(MANY, memory_limit_gib=60.0, target_seconds=target)) - 33) + 1e-9


@pytest.mark.parametrize(("wanted", "accumulation"), [(300, 13), (40, 3), (2, 1)])
def test_samples_out_of_reach_are_said_with_the_accumulation_that_reaches_them(wanted, accumulation):
    run = {"memory_limit_gib": 8.6, "samples_per_step": wanted}
    made = plan(MANY, **run)
    said = re.search(r"With gradient_accumulation_steps=(\d+) it would hold ([\d.]+)\.", " ".join(made.findings))
    assert int(said[1]) == accumulation
    reached = samples_per_step(
        plan(MANY, **run, gradient_accumulation_steps=accumulation), gradient_accumulation_steps=accumulation
    )
    assert reached == pytest.approx(float(said[2]), abs=0.06)
    assert reached == pytest.approx(wanted, rel=0.06)
    assert abs(samples_per_step(made) - wanted) > 0.06 * wanted


@pytest.mark.parametrize(
    ("wanted", "accumulation", "words"),
    [
        (1, 1, "2.0 samples on average; samples_per_step is 1. Fewer ranks would lower it"),
        (12, 2, "With gradient_accumulation_steps=3 it would come no nearer: 15.5."),
        (100_000, 2, "samples_per_step is 100000. The dataset has 5700 in all."),
    ],
)
def test_samples_that_no_accumulation_reaches_are_said(wanted, accumulation, words):
    made = plan(MANY, samples_per_step=wanted, gradient_accumulation_steps=accumulation)
    assert words in " ".join(made.findings)


def test_the_price_of_holding_the_samples_is_said():
    made = plan(MANY, memory_limit_gib=60.0, samples_per_step=6)
    assert any(f.startswith("Harmful") and "That is the price of samples_per_step" in f for f in made.findings)


def test_given_batch_sizes_count_towards_the_samples_of_a_step():
    made = plan(MANY, memory_limit_gib=60.0, samples_per_step=40, batch_sizes={"1x60x104": 10})
    assert sizes(made)["1x60x104"] == 10
    assert samples_per_step(made) == pytest.approx(40, rel=0.05)


def test_a_memory_limit_without_measured_memory_is_refused():
    with pytest.raises(UserError, match="memory_limit_gib = 40 says nothing without measured memory"):
        make_plan(COUNTS, COST, memory_limit_gib=40, **RUN)


def test_a_cost_without_seconds_takes_no_seconds_and_says_its_unit():
    counted = FlopCount(0.0, 0.0, 1e-3, 1e-8)
    with pytest.raises(UserError, match="target_seconds is 2, but this cost was counted, not measured"):
        plan(cost=counted, target_seconds=2.0)
    made = plan(MANY, cost=counted, memory_limit_gib=60.0, samples_per_step=5)
    assert "relative cost" in " ".join(made.findings) and "seconds costs" not in " ".join(made.findings)


def test_a_sample_longer_than_what_is_known_to_fit_is_said():
    made = plan(memory=None, m_mem_tokens=20_000)
    assert made.batch_size_of("21x60x104") == 1
    assert made.findings[0].startswith(
        "Memory was not measured: known to fit are 20000 tokens, and these may not: 21x"
    )


def test_the_automatic_target_counts_given_batch_sizes():
    made = plan(MANY, memory_limit_gib=60.0, batch_sizes={"21x60x104": 3})
    assert sizes(made)["21x60x104"] == 3
    assert not any(finding.startswith("Harmful") for finding in made.findings)


def test_a_plan_survives_json_and_answers_by_shape():
    made = plan()
    again = BucketPlan.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again == made
    assert made.batch_size_of(LatentShape(1, 32, 32)) == made.batch_size_of("1x32x32")
    with pytest.raises(UserError, match="no shape 2x2x2; it has 1x32x32"):
        made.batch_size_of("2x2x2")


def test_text_tokens_count_towards_the_limits():
    without = plan(target_seconds=2.6)
    joined = plan(target_seconds=2.6, geometry=TokenGeometry((1, 2, 2), text_tokens=512))
    assert joined.buckets[0].tokens == without.buckets[0].tokens + 512
    assert joined.buckets[0].batch_size < without.buckets[0].batch_size


def test_a_shape_that_repeats_leave_out_keeps_its_place_in_the_plan():
    made = plan({**COUNTS, LatentShape(9, 60, 104): 0})
    assert [bucket.count for bucket in made.buckets] == [900, 60, 0, 30]


@pytest.mark.parametrize("memory", [MEMORY, None])
def test_a_printed_plan_has_a_line_for_each_bucket(memory):
    made = plan(memory=memory)
    head, columns, *lines = str(made).splitlines()
    assert head.startswith("dual, balance auto: at most ")
    assert columns.split() == ["shape", "tokens", "samples", "batch", "size", "cost", "GiB", "bound", "by"]
    assert [line.split()[0] for line in lines[:3]] == list(map(str, made.shapes))
    assert [int(line.split()[3]) for line in lines[:3]] == [bucket.batch_size for bucket in made.buckets]
    assert all((line.split()[5] == "-") == (memory is None) for line in lines[:3])
    assert tuple(lines[3:]) == made.findings
    assert str(BucketPlan("given", None, None, made.buckets)).startswith("given, balance auto: no limit")
