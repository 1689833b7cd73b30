"""Does dealing still bring what the gates table says, on its whole corpus, and would a loss of it be noticed?"""

import json
from pathlib import Path

import numpy as np
import pytest
import schedule_gates
from schedule_gates import LONGEST, ROWS, corpus, gradient_shares, law, measure, missed, schedules

from adaptiveload_hf.buckets.plan import make_plan
from adaptiveload_hf.buckets.schedule import schedule_epoch
from adaptiveload_hf.buckets.shapes import TokenGeometry
from adaptiveload_hf.buckets.simulate import simulate

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "recipes" / "results" / "schedule_gates.json"
COUNTS = corpus(300_000)
# A seed that the committed table does not have.
SEEDS = (11,)


def name(row):
    return f"{row.world_size}x{row.gradient_accumulation_steps}-{row.balance}-{row.memory}-{row.dealt_by}"


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_every_row_reaches_its_floor(row):
    assert missed(row, measure(row, COUNTS, SEEDS)) == []


@pytest.mark.parametrize("row", [row for row in ROWS if row.least_efficiency], ids=name)
def test_without_dealing_every_row_would_miss_its_floor(row):
    found = measure(row._replace(balance="none"), COUNTS, SEEDS)
    assert "efficiency" in missed(row, found)


@pytest.mark.parametrize(("world_size", "accumulation"), [(8, 4), (64, 4), (64, 1)])
@pytest.mark.parametrize("balance", ["none", "step", "window:8", "auto"])
def test_no_other_policy_within_memory_is_faster_under_the_same_dealing(world_size, accumulation, balance):
    index = np.repeat(np.arange(len(COUNTS)), list(COUNTS.values()))
    run = {"world_size": world_size, "gradient_accumulation_steps": accumulation, "balance": balance}

    def epoch_seconds(policy):
        # Of these limits the least that equal time stays within too.
        plan = make_plan(COUNTS, law(), m_mem_tokens=6 * LONGEST, policy=policy, **run)
        assert max(bucket.batch_size * bucket.tokens for bucket in plan.buckets) <= 6 * LONGEST
        return simulate(schedule_epoch(index, plan, law(), seed=SEEDS[0], **run)).epoch_seconds

    assert epoch_seconds("dual") <= 1.005 * min(map(epoch_seconds, ("equal_token", "equal_time")))


def test_a_lost_sample_is_noticed(monkeypatch):
    whole = schedule_gates.schedule_epoch

    def lossy(*args, **options):
        schedule = whole(*args, **options)
        schedule.sample_order[0] = schedule.sample_order[1]
        return schedule

    monkeypatch.setattr(schedule_gates, "schedule_epoch", lossy)
    with pytest.raises(AssertionError):
        next(schedules(ROWS[0], corpus(3_000), SEEDS))


def test_weights_of_shapes_are_their_share_of_samples_and_of_tokens():
    samples = np.array(list(COUNTS.values()))
    tokens = np.array([TokenGeometry().tokens(shape) for shape in COUNTS])
    ((ours, baseline),) = schedules(ROWS[0], COUNTS, SEEDS)
    shares = gradient_shares(ours)
    assert shares["sample"] == pytest.approx(samples / samples.sum(), rel=1e-9)
    # Dividing by the tokens of each step, instead of the mean, leaves a little in favour of small steps.
    assert shares["token"] == pytest.approx(samples * tokens / (samples @ tokens), rel=0.04)
    ((stratified, _),) = schedules(ROWS[0]._replace(balance="stratified:8"), COUNTS, SEEDS)
    off = [
        np.abs(gradient_shares(each)["token"] / (samples * tokens / (samples @ tokens)) - 1)
        for each in (ours, stratified)
    ]
    assert off[1].max() <= off[0].max()
    ((window, _),) = schedules(ROWS[2], COUNTS, SEEDS)
    assert gradient_shares(window)["token"] == pytest.approx(samples * tokens / (samples @ tokens), rel=0.08)
    # Plain averaging of equal-token batches is the token mean but for rounding B down; a compute limit moves it.
    longest = list(COUNTS)[np.argmax(tokens)]
    place = list(COUNTS).index(longest)
    assert gradient_shares(baseline)["none"][place] < shares["token"][place] < shares["none"][place] / 1.5


def test_the_law_stretched_costs_a_short_sample_what_a_long_one_costs():
    assert law(stretch=10).seconds(3, 7560) == pytest.approx(law().seconds(3, 75600))


def test_committed_numbers_are_of_these_rows_and_reach_every_floor():
    result = json.loads(RESULT.read_text())
    assert all(result[key] for key in ("what", "numpy", "python", "date", "command"))
    assert len(result["rows"]) == len(ROWS)
    for row, found in zip(ROWS, result["rows"]):
        assert [found[field] for field in row._fields] == [None if value == np.inf else value for value in row]
        assert missed(row, found) == []


def test_the_page_on_balance_shows_the_committed_numbers():
    page = (ROOT / "docs" / "balance.md").read_text()
    for row in json.loads(RESULT.read_text())["rows"]:
        chosen = row["balance_chosen"]
        balance = chosen if row["balance"] == chosen else f"{row['balance']}: {chosen}"
        run = f"| {row['world_size']} | {row['gradient_accumulation_steps']} | {balance} | {row['memory']} |"
        dealt_by = {"law": "law", "flops": "FLOPs"}[row["dealt_by"]]
        reached = f"{row['efficiency']['worst']:.1%} | {row['step_cv']['worst']:.4f} | {row['speedup']['worst']:.2f} |"
        samples = f"{row['samples_per_step']:.0f}, {row['samples_per_step_cv']:.2f} |"
        assert f"{run} {dealt_by} | {reached} {samples}" in page
