"""Does dealing still bring what the gates table says, on its whole corpus, and would a loss of it be noticed?"""

import json
from pathlib import Path

import numpy as np
import pytest
import schedule_gates
from schedule_gates import ROWS, corpus, gradient_shares, law, measure, missed, schedules

from adaptiveload_hf.buckets.shapes import TokenGeometry

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
