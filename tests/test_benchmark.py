"""Are the right points timed, is the number the slowest rank's micro-step, and is nothing lost on the way?"""

import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from hypothesis import given, settings
from hypothesis import strategies as st
from support.accelerators import FSDP2, fresh_accelerate, one_rank
from support.launch import ROOT, launch

from adaptiveload_hf import LatentShape, Measurement, TokenGeometry, UserError, fit_cost_model, make_accelerator
from adaptiveload_hf.benchmark import Point, append_line, choose_points, measure_shapes, measure_steps
from adaptiveload_hf.buckets.cost import Roofline, read_measurements
from adaptiveload_hf.buckets.memory import fit_memory_model
from adaptiveload_hf.device_memory import DeviceMemory

WORKER = ROOT / "tests" / "support" / "benchmark_worker.py"
SHAPES = [LatentShape(1, 60, 104), LatentShape(5, 60, 104), LatentShape(13, 60, 104), LatentShape(21, 60, 104)]
sides = st.integers(1, 12).map(lambda n: 2 * n)


@pytest.fixture
def accelerator():
    yield make_accelerator(gradient_accumulation_steps=2)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def point(tokens: int, batch_size: int) -> Point:
    return Point(LatentShape(tokens, 2, 2), tokens, batch_size)


@settings(max_examples=50, deadline=None)
@given(st.sets(st.builds(LatentShape, st.integers(1, 21), sides, sides), min_size=1), st.integers(4, 20))
def test_points_span_the_data_and_climb_in_size(shapes, max_points):
    geometry = TokenGeometry()
    points = choose_points(shapes, geometry, max_points=max_points)
    lengths = {geometry.tokens(shape) for shape in shapes}
    assert len(points) == len(set(points)) <= max_points
    assert all(point.tokens == geometry.tokens(point.shape) for point in points)
    assert [point.all_tokens for point in points] == sorted(point.all_tokens for point in points)
    assert points[0].batch_size == 1
    assert points[0].tokens <= min(lengths)
    assert max(point.all_tokens for point in points) <= 2 * max(lengths)
    assert max(point.tokens for point in points) == max(lengths)


@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[-1:]], ids=["stills and clips", "one shape only"])
def test_the_chosen_points_tell_floor_linear_and_quadratic_part_apart(shapes):
    law = Roofline(floor=0.5, c0=1e-3, c1=6e-5, c2=2e-9)
    measured = [
        Measurement(str(p.shape), p.tokens, p.batch_size, float(law.seconds(p.batch_size, p.tokens)), 0.0)
        for p in choose_points(shapes, TokenGeometry())
    ]
    fitted = fit_cost_model(measured).model
    for tokens in (1560, 7800, 20280, 32760):
        for batch in (1, 2, 65520 // tokens):
            assert fitted.seconds(batch, tokens) == pytest.approx(law.seconds(batch, tokens), rel=0.01)


def test_too_few_points_and_no_shapes_are_named():
    with pytest.raises(UserError, match=r"max_points must be at least 4 .* but it is 3"):
        choose_points(SHAPES, TokenGeometry(), max_points=3)
    with pytest.raises(UserError, match="at least one shape is needed"):
        choose_points([], TokenGeometry())


def test_seconds_are_those_of_a_warm_micro_step(accelerator):
    calls = []

    def run_step(shape, batch_size):
        calls.append((str(shape), batch_size))
        time.sleep(0.3 if len(calls) == 1 else 0.02)

    (measurement,) = measure_steps(accelerator, run_step, [point(4, 3)])
    assert measurement.seconds == pytest.approx(0.01, rel=0.2), "K = 2 micro-steps share 0.02 s"
    assert measurement.rank_seconds == (measurement.seconds,)
    assert measurement.peak_gib == 0.0, "not measured on CPU"
    assert (measurement.shape, measurement.tokens, measurement.batch_size) == ("4x2x2", 4, 3)
    assert set(calls) == {("4x2x2", 3)}


def test_an_interrupted_benchmark_goes_on_where_it_stopped(accelerator, tmp_path):
    path = tmp_path / "config" / "measurements.jsonl"
    seen = []

    def run_step(shape, batch_size):
        seen.append(batch_size)
        if batch_size == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_steps(accelerator, run_step, [point(4, 1), point(4, 2)], output_path=path)
    with open(path, "a") as file:
        file.write('{"shape": "4x2x2", "tok')  # a line that was cut short
    seen.clear()
    with pytest.warns(UserWarning, match="line 2.*the other lines are kept"):
        measurements = measure_steps(
            accelerator, lambda *point: seen.append(point), [point(4, 1), point(4, 3)], output_path=path
        )
    assert {batch for _, batch in seen} == {3}
    assert [m.batch_size for m in measurements] == [1, 3]
    kept, problems = read_measurements(path)
    assert [m.batch_size for m in kept] == [1, 3]
    assert len(problems) == 1
    assert "line 2" in problems[0]


def test_out_of_memory_is_a_bound_and_larger_points_are_left_out(accelerator, tmp_path):
    phases = []

    def run_step(shape, batch_size):
        phases.append(accelerator.step)
        accelerator.step += 1  # as accumulate does
        if batch_size * shape.frames > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        accelerator.step += 1

    points = [point(4, 1), point(4, 3), point(16, 1), point(2, 4)]
    measurements = measure_steps(accelerator, run_step, points, output_path=tmp_path / "measurements.jsonl")
    assert [(m.tokens, m.batch_size, m.oom) for m in measurements] == [(4, 1, False), (4, 3, True), (2, 4, False)]
    assert all(phase % 2 == 0 for phase in phases), "an optimizer step begins in the middle of accumulation"
    again = measure_steps(accelerator, run_step, points, output_path=tmp_path / "measurements.jsonl")
    assert again == measurements


def test_a_model_of_which_no_step_fits_is_an_error(accelerator):
    def run_step(shape, batch_size):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(UserError, match="at least one step must fit into memory"):
        measure_steps(accelerator, run_step, [point(4, 1)])


def test_out_of_memory_of_a_sharded_model_without_a_file_to_go_on_from_is_an_error():
    def run_step(shape, batch_size):
        raise torch.OutOfMemoryError("CUDA out of memory")

    refused = pytest.raises(UserError, match=r"4x2x2 with batch size 1 needs more memory .* Pass an output_path")
    with fresh_accelerate(**one_rank(**FSDP2)), refused:
        measure_steps(make_accelerator(), run_step, [point(4, 1)])


@pytest.mark.distributed
def test_out_of_memory_on_one_rank_is_kept_as_a_bound_and_all_ranks_start_again_and_go_on(tmp_path):
    path = tmp_path / "measurements.jsonl"
    done = launch(WORKER, path, 4)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", *["0 begins"] * 2, "0 has 3", *["1 begins"] * 2, "1 has 3"]
    measurements, problems = read_measurements(path)
    assert not problems
    assert [(m.tokens, m.batch_size, m.oom) for m in measurements] == [(1, 1, False), (4, 1, False), (4, 2, True)]
    for measured in measurements[:2]:
        first, second = measured.rank_seconds
        assert measured.seconds == max(first, second) >= 0.02
        assert second == pytest.approx(0.02, rel=0.3)


@pytest.fixture
def device(monkeypatch):
    """A stand-in for the allocator of a GPU with 10 GiB: set by the step that runs."""
    counters = {"peak_gib": 0.0, "reserved_gib": 0.0, "retries": 0}
    monkeypatch.setattr("adaptiveload_hf.benchmark.read_device_memory", lambda _: DeviceMemory(**counters))
    monkeypatch.setattr("adaptiveload_hf.benchmark.available_gib", lambda _: 10.0)
    return counters


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when a step says so."""
    now = [0.0]
    monkeypatch.setattr("adaptiveload_hf.benchmark.time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_a_point_that_is_predicted_not_to_fit_is_left_out_and_said(accelerator, device, clock, capsys):
    calls = []

    def run_step(shape, batch_size):
        calls.append(batch_size)
        clock[0] += 0.1
        device["peak_gib"] = 1.0 + batch_size
        device["reserved_gib"] = 1.5 + batch_size

    measurements = measure_steps(accelerator, run_step, [point(4, 1), point(4, 3), point(4, 8), point(4, 16)])
    assert {*calls} == {1, 3, 8}
    assert [(m.peak_gib, m.reserved_gib) for m in measurements] == [(2.0, 2.5), (4.0, 4.5), (9.0, 9.5)]
    assert "4x2x2 with batch size 16 is left out: it would need 17 GiB of 10" in capsys.readouterr().err


def test_steps_in_which_the_allocator_tried_again_are_dropped_and_one_that_always_does_is_a_bound(
    accelerator, device, clock
):
    calls = []

    def run_step(shape, batch_size):
        calls.append(batch_size)
        retried = batch_size == 2 or calls.count(1) in (3, 4)
        device["retries"] += retried
        clock[0] += 0.1 if retried else 0.02

    measurements = measure_steps(accelerator, run_step, [point(4, 1), point(4, 2), point(4, 3)])
    assert measurements[0].seconds == pytest.approx(0.01)
    assert [(m.batch_size, m.oom) for m in measurements] == [(1, False), (2, True)]


def test_a_point_is_done_once_its_median_is_known_to_two_percent_or_it_took_long_enough(accelerator, clock):
    calls = {1: 0, 2: 0, 3: 0}

    def run_step(shape, batch_size):
        calls[batch_size] += 1
        clock[0] += {1: 0.1, 2: (0.02, 0.06)[calls[2] % 2], 3: 9.0}[batch_size]

    measure_steps(accelerator, run_step, [point(4, 1), point(4, 2), point(4, 3)])
    assert calls == {1: 2 + 3, 2: 2 + 6, 3: 1 + 2}, "to warm up, and timed"


def test_the_bar_says_how_long_the_rest_takes(accelerator, clock, capsys):
    def run_step(shape, batch_size):
        clock[0] += 0.5 * batch_size

    measure_steps(accelerator, run_step, [point(4, 1), point(4, 2)])
    assert "4x2x2 B=2, about 5 s left" in capsys.readouterr().err  # 5 steps of 1 s


def test_the_climb_off_the_floor_counts_among_the_points(accelerator, clock, tmp_path):
    sizes = []

    def run_step(shape, batch_size):
        sizes.append((shape, batch_size))
        clock[0] += max(0.4, 2e-6 * batch_size * TokenGeometry().tokens(shape))

    found = measure_shapes(accelerator, run_step, SHAPES, TokenGeometry(), output_path=tmp_path / "measurements.jsonl")
    assert len({*sizes}) == len(found) == 12
    assert max(m.seconds for m in found) > 3 * min(m.seconds for m in found)


def test_a_high_floor_neither_fills_with_points_nor_makes_those_of_long_shapes_take_minutes(
    accelerator, clock, tmp_path
):
    shapes = [LatentShape(1, 32, 32), *SHAPES]
    steps = {}

    def run_step(shape, batch_size):
        tokens = TokenGeometry().tokens(shape)
        steps[shape, batch_size] = max(1.6, batch_size * (4e-5 * tokens + 3e-9 * tokens**2))
        clock[0] += steps[shape, batch_size]

    measure_shapes(accelerator, run_step, shapes, TokenGeometry(), output_path=tmp_path / "measurements.jsonl")
    assert len(steps) == 12
    shortest = [seconds for (shape, _), seconds in steps.items() if shape == shapes[0]]
    assert max(steps.values()) <= 1.5 * max(shortest)
    assert sum(seconds == 1.6 for seconds in steps.values()) <= 4


def measure_peaks(accelerator, device, clock, tmp_path, gib_of_tokens, **options):
    """Steps above the floor of seconds from the first climb on; their peaks as given."""

    def run_step(shape, batch_size):
        tokens = batch_size * TokenGeometry().tokens(shape)
        clock[0] += max(0.4, 4e-5 * tokens)
        device["peak_gib"] = gib_of_tokens(tokens)

    path = tmp_path / "measurements.jsonl"
    found = measure_shapes(accelerator, run_step, SHAPES, TokenGeometry(), output_path=path, **options)
    again = measure_shapes(accelerator, run_step, SHAPES, TokenGeometry(), output_path=path, **options)
    assert again == found and len(found) <= 12
    return sorted(m.batch_size * m.tokens for m in found)


def test_the_batch_climbs_on_until_the_slope_of_memory_above_its_floor_is_known(accelerator, device, clock, tmp_path):
    def gib(tokens):
        return max(2.66, 1.6 + 2e-5 * tokens)

    work = measure_peaks(accelerator, device, clock, tmp_path, gib)
    assert gib(work[-2]) > 2.66 and work[-1] == pytest.approx(2 * work[-2], rel=0.1)
    assert fit_memory_model(read_measurements(tmp_path / "measurements.jsonl")[0]).known_tokens is None


def test_the_climb_goes_beyond_a_rising_floor_where_gradients_are_freed(accelerator, device, clock, tmp_path):
    def gib(tokens):  # half a GiB of gradients; the line is the higher one from 125,000 tokens on
        return max(1.6 + 1e-5 * tokens, 1.1 + 1.4e-5 * tokens)

    work = measure_peaks(accelerator, device, clock, tmp_path, gib, freed_gib=0.5)
    measured = read_measurements(tmp_path / "measurements.jsonl")[0]
    memory = fit_memory_model(measured, freed_gib=0.5)
    assert memory.known_tokens is None and memory.gib_per_token == pytest.approx(1.4e-5, rel=0.02)
    without = measure_peaks(accelerator, device, clock, tmp_path / "not known", gib)
    assert without[-1] < work[-1]


def test_the_climb_for_memory_stays_within_what_surely_fits(accelerator, device, clock, tmp_path):
    work = measure_peaks(accelerator, device, clock, tmp_path, lambda tokens: 6.0)
    before = max(w for w in work if w < work[-1])
    assert 1.4 * before < work[-1] <= 1.5 * before, "90% of 10 GiB are there, and 6 taken"


def test_the_climb_for_memory_ends_below_a_point_that_ran_out_of_memory(accelerator, device, clock, tmp_path):
    bound = Measurement("21x60x104", 32760, 3, 0.0, 6.0, oom=True)
    append_line(tmp_path / "measurements.jsonl", bound.to_json())
    assert max(measure_peaks(accelerator, device, clock, tmp_path, lambda tokens: 6.0)) <= 3 * 32760


def test_a_climb_for_memory_alone_does_not_take_minutes(accelerator, device, clock, tmp_path, monkeypatch):
    monkeypatch.setattr("adaptiveload_hf.benchmark.LONGEST_CLIMB_SECONDS", 1.0)
    work = measure_peaks(accelerator, device, clock, tmp_path, lambda tokens: 6.0)
    assert work[-1] < 1.1 * work[-2]


def test_a_range_of_two_shapes_is_filled_with_lengths_between():
    points = choose_points([LatentShape(1, 32, 32), LatentShape(21, 60, 104)], TokenGeometry())
    lengths = sorted({p.tokens for p in points})
    assert (lengths[0], lengths[-1]) == (256, 32760)
    assert max(longer / shorter for shorter, longer in pairwise(lengths)) <= 5


def test_a_line_is_appended_on_a_line_of_its_own(tmp_path: Path):
    path = tmp_path / "new" / "file.jsonl"
    append_line(path, "one")
    append_line(path, "two")
    path.write_text(path.read_text() + "cut sh")
    append_line(path, "three")
    assert path.read_text() == "one\ntwo\ncut sh\nthree\n"
