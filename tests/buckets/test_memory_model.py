"""Is predicted memory on or above what was measured, and never too low beyond it, where the optimizer sets a floor?"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptiveload_hf.buckets.cost import Measurement, MemoryModel, read_measurements
from adaptiveload_hf.buckets.fit import describe_measurements, fit_cost_model
from adaptiveload_hf.buckets.memory import fit_memory_model
from adaptiveload_hf.environment import MEMORY_RESERVE, freed_gradients_gib, memory_elsewhere

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
GRADIENTS_GIB = 5.286  # of Wan 1.3B in float32
UNSEEN = 1 / 1.02  # peaks within 2% of the floor count as on it


@pytest.fixture(scope="module")
def h200():
    """See tests/data/README.md; by growing peak: eight on the floor, three just above it, and 71 GiB."""
    measured, problems = read_measurements(DATA / "h200_wan_memory.jsonl")
    assert not problems and len(measured) == 12
    return sorted(measured, key=lambda m: m.peak_gib)


def peaks(*points):
    return [Measurement("1x8x8", 16, batch, 1.0, float(gib)) for batch, gib in points]


def predict(memory, measured):
    return float(memory.gib(measured.batch_size, measured.tokens))


def test_points_on_the_floor_do_not_flatten_the_slope_of_real_h200_steps(h200):
    memory = fit_memory_model(h200)
    assert memory.known_tokens is None
    assert memory.gib(1, 1560) == pytest.approx(26.6, abs=0.01) and memory.gib(1, 32760) < 26.7
    assert memory.gib_per_token == pytest.approx(1.93e-4, rel=0.01)
    assert memory.gib_per_sample == pytest.approx(0.0257, rel=0.01)
    for measured in h200:
        assert measured.peak_gib - 1e-6 <= predict(memory, measured) <= 1.05 * measured.peak_gib
    middle = [m for m in h200 if 27 < m.peak_gib < 60]
    assert predict(fit_memory_model([m for m in h200 if m not in middle[1:]]), h200[-1]) == pytest.approx(
        71.03, rel=0.05
    )


@pytest.fixture(scope="module")
def fused():
    """See tests/data/README.md; by growing peak, the one that ran out of memory left out."""
    measured, problems = read_measurements(DATA / "h200_wan_fused_adamw.jsonl")
    assert not problems and len(measured) == 12 and measured[-1].oom
    return sorted(measured[:-1], key=lambda m: m.peak_gib)


def test_points_of_at_most_42_gib_tell_real_peaks_of_52_to_94_where_the_floor_rises(fused):
    rows = json.loads((ROOT / "recipes" / "results" / "wan21_1.3b_memory_large.json").read_text())["rows"]
    assert max(m.peak_gib for m in fused) < 42.1 and len(rows) == 4
    memory = fit_memory_model(fused, gpu_memory_gib=139.8, freed_gib=GRADIENTS_GIB)
    for row in rows:
        assert memory.gib(row["batch_size"], row["tokens"]) == pytest.approx(row["peak_gib"], rel=0.005)
    for measured in fused:
        assert measured.peak_gib - 1e-6 <= predict(memory, measured) <= 1.02 * measured.peak_gib
    assert memory.gib(400, 1560) > 0.99 * 139.8, "it ran out of memory"
    assert memory.floor_gib - memory.base_gib == pytest.approx(GRADIENTS_GIB, rel=0.05)


def test_the_largest_planned_micro_batch_was_predicted_from_points_of_a_third_of_its_memory():
    measured, problems = read_measurements(ROOT / "recipes" / "results" / "wan21_1.3b_benchmark.jsonl")
    assert not problems and len(measured) == 12
    *points, largest = measured
    memory = fit_memory_model(points, gpu_memory_gib=139.8, freed_gib=GRADIENTS_GIB)
    assert predict(memory, largest) == pytest.approx(125.16, abs=0.01) and largest.peak_gib > 125.8
    assert int(memory.max_tokens(125.8, 32760)) // 32760 == 18


def test_a_floor_that_rises_is_not_taken_for_the_line_of_larger_micro_batches(fused):
    """At all these points a step's end is the peak. One line fits them well, and is too low beyond."""
    small = [m for m in fused if m.peak_gib < 25]
    memory = fit_memory_model(small, gpu_memory_gib=139.8, freed_gib=GRADIENTS_GIB)
    assert memory.known_tokens == max(m.batch_size * m.tokens for m in small)
    for measured in fused:
        assert predict(memory, measured) >= 0.99 * measured.peak_gib
    assert fit_memory_model(small).known_tokens is None, "nothing to free, as with K > 1"
    assert fit_memory_model(small, freed_gib=0.2).known_tokens is None, "LoRA's gradients"


def test_only_gradients_of_a_single_micro_step_are_freed():
    measured = {"gradient_gib": 5.3, "gradient_accumulation_steps": 1}
    assert freed_gradients_gib(measured) == 5.3
    for other in ({"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": None}, {"gradient_gib": None}):
        assert freed_gradients_gib({**measured, **other}) == 0.0


@settings(max_examples=80, deadline=None)
@given(
    st.floats(5, 60),
    st.floats(0.05, 0.4),
    st.floats(2e-5, 3e-4),
    st.floats(1.05, 6),
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from([1560, 7800, 14040, 32760])), min_size=4, max_size=11),
)
def test_of_two_lines_the_known_one_is_that_of_larger_micro_batches(floor, gradients, slope, steeper, points):
    def gib(batch, tokens):
        work = batch * tokens
        return max(floor + slope * work, (1 - gradients) * floor + steeper * slope * work)

    measured = [Measurement("1x8x8", s, batch, 1.0, gib(batch, s)) for batch, s in dict.fromkeys(points)]
    largest = max(m.batch_size * m.tokens for m in measured)
    if len({m.batch_size * m.tokens for m in measured}) < 2:
        return
    memory = fit_memory_model(measured, freed_gib=gradients * floor)
    for m in measured:
        assert predict(memory, m) >= UNSEEN * m.peak_gib
    for times in (2, 4):
        batch = -(-times * largest // 1560)
        assert memory.gib(batch, 1560) >= 0.85 * gib(batch, 1560), "up to half of the gradients are missed"


def test_what_a_sample_takes_beside_its_tokens_is_told_from_them():
    def gib(batch, tokens):
        return max(15.0, 9.0 + batch * (0.027 + 1.83e-4 * tokens))

    points = [(1, 256), (255, 256), (510, 256), (16, 1280), (2, 7800), (19, 3328), (1, 32760)]
    measured = [Measurement("1x8x8", tokens, batch, 1.0, gib(batch, tokens)) for batch, tokens in points]
    memory = fit_memory_model(measured)
    assert memory.gib_per_sample == pytest.approx(0.027, rel=1e-3)
    # As tokens alone, this one would be predicted at 85.
    assert memory.gib(8, 32760) == pytest.approx(gib(8, 32760), rel=1e-3)
    assert memory.max_tokens(60.0, np.array([256, 32760])).tolist() == pytest.approx([176_830, 277_440], rel=1e-3)


def test_real_fsdp2_steps_tell_what_a_still_takes_beside_its_tokens_and_seven_tell_their_form():
    measured, problems = read_measurements(DATA / "h200_fsdp2_steps.jsonl")
    assert not problems and len(measured) == 7
    memory = fit_memory_model(measured)
    assert memory.known_tokens is None and memory.gib_per_sample == pytest.approx(0.022, rel=0.01)
    assert predict(memory, measured[2]) == pytest.approx(56.15, abs=0.01) and measured[2].tokens == 256
    by_stills = fit_memory_model([m for m in measured if m.tokens == 256])
    assert by_stills.gib(33, 3328) == pytest.approx(40.8, abs=0.1), "as tokens alone"
    assert memory.gib(33, 3328) == pytest.approx(32.11, abs=0.01)
    assert fit_cost_model(measured).model.kind == "roofline"


def test_a_point_of_the_shortest_shape_left_out_is_predicted_from_longer_ones(h200):
    shortest = [m for m in h200 if m.tokens == 1560 and m.peak_gib > 27]
    assert len(shortest) == 2
    for left_out in shortest:
        memory = fit_memory_model([m for m in h200 if m is not left_out])
        if memory.known_tokens is None:
            assert predict(memory, left_out) == pytest.approx(left_out.peak_gib, rel=0.05)
        else:
            assert predict(memory, left_out) > left_out.peak_gib


@pytest.mark.parametrize("points", [3, 8, 9, 10, 11])
def test_without_the_largest_h200_step_its_memory_is_not_predicted_too_low_and_said_to_be_unknown(h200, points):
    known = h200[:points]
    memory = fit_memory_model(known)
    assert memory.known_tokens == max(m.batch_size * m.tokens for m in known)
    for measured in h200:
        assert predict(memory, measured) >= UNSEEN * measured.peak_gib
    assert predict(memory, h200[-1]) > h200[-1].peak_gib
    assert h200[-1].batch_size * h200[-1].tokens > memory.max_tokens(71.0, 16)
    (found,) = [words for words in describe_measurements(known) if "how memory grows" in words]
    rise = "No point rises" if points <= 8 else "Too few points rise"
    assert found.startswith(f"{rise} above the floor of 26.")
    assert f"beyond B*S = {memory.known_tokens} is not known" in found
    if points == 11:
        assert found.endswith("Add 1x60x104 at batch size 84.")


def test_nothing_is_said_of_a_slope_that_is_known(h200):
    assert not [words for words in describe_measurements(h200) if "how memory grows" in words]


def test_what_the_allocator_held_for_each_h200_step_is_within_what_plans_keep_free(h200):
    assert max(m.reserved_gib / m.peak_gib for m in h200) * (1 - MEMORY_RESERVE) < 0.99


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0, 20),
    st.floats(0, 0.05),
    st.floats(1e-5, 1e-3),
    st.floats(1, 40),
    st.lists(st.tuples(st.integers(1, 300), st.sampled_from([64, 256, 1560, 7800, 32760])), min_size=4, max_size=10),
    st.randoms(use_true_random=False),
)
def test_a_known_law_of_samples_and_tokens_is_on_or_above_every_peak(base, by_sample, by_token, floor, points, random):
    def gib(batch, tokens):
        return max(floor, base + batch * (by_sample + by_token * tokens)) * (1 + 0.003 * random.random())

    measured = [Measurement("1x8x8", s, batch, 1.0, gib(batch, s)) for batch, s in dict.fromkeys(points)]
    if len({m.batch_size * m.tokens for m in measured}) < 2:
        return
    memory = fit_memory_model(measured)
    for m in measured:
        assert predict(memory, m) >= UNSEEN * m.peak_gib
    lengths = np.unique([m.tokens for m in measured])
    tokens = memory.max_tokens(100.0, lengths)
    assert (memory.gib(tokens // lengths, lengths)[tokens >= lengths] <= 100.0 * (1 + 1e-9)).all()
    assert (np.diff(tokens) >= 0).all(), "long samples share what each takes"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 0.5)), min_size=1, max_size=3),
    st.floats(1, 40),
    st.sets(st.integers(1, 300), min_size=2, max_size=8),
)
def test_peaks_that_are_the_highest_of_lines_are_bounded_where_the_slope_is_unknown_at_any_size(lines, floor, batches):
    def gib(batch):
        return max(floor, *(base + slope * batch for base, slope in lines)) if lines else floor

    memory = fit_memory_model(peaks(*((batch, gib(batch)) for batch in batches)))
    sizes = sorted(batches) if memory.known_tokens is None else range(1, 1000, 7)
    least = 1 - 1e-6 if memory.known_tokens is None else UNSEEN - 1e-6
    for batch in sizes:
        assert memory.gib(batch, 16) >= least * gib(batch)


@pytest.mark.parametrize(
    "memory",
    [
        MemoryModel(2.0, 1e-4, 5.0),
        MemoryModel(2.0, 1e-4, 5.0, known_tokens=20_000),
        MemoryModel(2.0, 1e-4, 5.0, 50_000),
        MemoryModel(2.0, 1e-4, 5.0, None, 0.0, 5e-5),
        MemoryModel(2.0, 1e-4, 5.0, 20_000, 0.0, 5e-5),
    ],
)
def test_max_tokens_is_the_last_that_fits_on_the_line_and_on_the_bound(memory):
    for limit in (5.0, 6.0, 20.0):
        tokens = int(memory.max_tokens(limit, 16))
        assert memory.gib(1, tokens) <= limit < memory.gib(1, tokens + 2)
    assert memory.max_tokens(4.9, 16) == 0


def test_memory_that_hardly_grows_allows_many_tokens_not_fewer_than_none():
    assert MemoryModel(20.0, 1e-25).max_tokens(80.0, np.array([256, 32760])).tolist() == [1 << 53, 1 << 53]


def test_the_bound_is_none_below_the_largest_measured_micro_batch():
    memory = MemoryModel(2.0, 1e-4, 5.0, known_tokens=50_000)
    sizes = np.array([1, 10_000, 40_000, 50_000])
    np.testing.assert_allclose(memory.gib(1, sizes), replace(memory, known_tokens=None).gib(1, sizes))
    assert memory.gib(1, 100_000) == pytest.approx(14.0)


def test_a_point_that_ran_out_of_memory_needs_more_than_it_reached():
    failed = Measurement("1x8x8", 16, 400, 0.0, 30.0, oom=True)
    memory = fit_memory_model([*peaks((100, 5), (200, 8)), failed])
    assert predict(memory, failed) > 30.0


def test_fewer_ranks_raise_floor_line_and_bound():
    memory = MemoryModel(2.0, 1e-4, 5.0, known_tokens=20_000)
    assert memory_elsewhere(memory, {"world_size": 8, "strategy": "fsdp2"}, 8, 1) == (memory, [])
    larger, _ = memory_elsewhere(memory, {"world_size": 8, "strategy": "fsdp2"}, 2, 1)
    assert larger == MemoryModel(8.0, 1e-4, 20.0, known_tokens=20_000)
    assert larger.gib(1, 40_000) == pytest.approx(2 * 20)


def test_more_micro_steps_than_measured_add_the_gradients_that_a_rank_keeps():
    memory, measured = MemoryModel(2.0, 1e-4, 5.0), {"gradient_accumulation_steps": 1, "gradient_gib": 1.5}
    kept, (said,) = memory_elsewhere(memory, measured, 2, 4)
    assert kept == MemoryModel(3.5, 1e-4, 5.0) and "keeps 1.50 GiB of gradients" in said
    on_fewer, _ = memory_elsewhere(memory, measured | {"world_size": 8, "strategy": "fsdp2"}, 2, 4)
    assert on_fewer.base_gib == 4 * 3.5
    assert memory_elsewhere(memory, measured, 2, 1) == (memory, [])
    assert memory_elsewhere(memory, measured | {"gradient_accumulation_steps": 4}, 2, 4) == (memory, [])


def test_more_micro_steps_than_measured_are_named_where_the_gradients_are_not_known():
    memory = MemoryModel(2.0, 1e-4, 5.0)
    kept, (said,) = memory_elsewhere(memory, {"gradient_accumulation_steps": 1}, 2, 4)
    assert kept == memory and "--gradient_accumulation_steps 4" in said


def test_four_micro_steps_on_two_gpus_need_what_the_law_of_one_and_the_gradients_say():
    """18.511 GiB with K = 4 on two H200s (recipes/step_memory.py): Wan 2.1 1.3B, FSDP2, patched, 13x60x104, B = 2."""
    points, _ = read_measurements(DATA / "h200_fsdp2_patched_steps.jsonl")
    law, sharded_float32 = fit_memory_model(points), 4 * 1_418_996_800 / 2 / 2**30
    measured = {"gradient_accumulation_steps": 1, "gradient_gib": sharded_float32}
    assert law.gib(2, 20_280) < 0.9 * 18.511
    assert memory_elsewhere(law, measured, 2, 4)[0].gib(2, 20_280) == pytest.approx(18.511, rel=0.02)
