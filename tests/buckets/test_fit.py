"""What a fit says beside its law: how sure it is, what strays, what the points cannot tell, which peak counts."""

import itertools
import re

import numpy as np
import pytest

from adaptiveload_hf.buckets import fit
from adaptiveload_hf.buckets.cost import Additive, Measurement, PowerLaw, Roofline
from adaptiveload_hf.buckets.fit import (
    describe_measurements,
    find_outliers,
    fit_cost_model,
    parameter_confidence,
)
from adaptiveload_hf.buckets.memory import fit_memory_model
from adaptiveload_hf.errors import UserError

TRUE = Additive(0.3, 0.01, 3e-5, 1.5e-9)
SHAPES = {"1x32x32": 256, "1x60x104": 1560, "5x60x104": 7800, "9x60x104": 14040, "21x60x104": 32760}
GRID = [(shape, batch) for shape in SHAPES for batch in (1, 2, 4, 8) if batch * SHAPES[shape] < 70_000]


def steps(law=TRUE, noise=0.0, seed=0, grid=GRID):
    random = np.random.default_rng(seed)
    return [
        Measurement(s, SHAPES[s], b, float(law.seconds(b, SHAPES[s]) * (1 + noise * random.standard_normal())), 0.0)
        for s, b in grid
    ]


def fit_additive(noise, seed):
    return fit_cost_model(steps(noise=noise, seed=seed), ["additive"])


def test_the_intervals_hold_the_law_about_as_often_as_they_say_and_are_the_same_each_time():
    held = []
    for seed in range(5):
        fit = fit_additive(0.02, seed)
        intervals = parameter_confidence(fit, draws=30)
        held += [low <= TRUE.parameters[name] <= high for name, (low, high) in intervals.items()]
    assert list(intervals) == list(TRUE.parameters)
    assert np.mean(held) > 0.7, "expected about 0.9 of 20"
    assert parameter_confidence(fit, draws=30) == intervals


def test_noisier_steps_have_wider_intervals_and_exact_ones_none():
    widths = [np.subtract(*parameter_confidence(fit_additive(noise, 1), draws=30)["c1"]) for noise in (0, 0.01, 0.05)]
    assert abs(widths[0]) < 1e-3 * TRUE.c1 < -widths[1] < -widths[2]


def test_a_stray_is_named_with_how_far_it_is_off_and_nothing_else_is():
    measurements = steps(noise=0.01)
    assert find_outliers(fit_cost_model(measurements, ["additive"])) == []
    stray = measurements[10]
    measurements[10] = Measurement(stray.shape, stray.tokens, stray.batch_size, 2 * stray.seconds, 0.0)
    (found,) = find_outliers(fit_cost_model(measurements[::-1], ["additive"]))
    assert (found.name, found.seconds) == (f"{stray.shape} at batch size {stray.batch_size}", 2 * stray.seconds)
    assert re.fullmatch(rf"{found.name} took \S+ s, (9|10)\d% more than the law's \S+ s\.", str(found))


def test_steps_on_the_floor_alone_are_refused_with_the_point_to_add():
    floor = Roofline(5.0, 0.001, 3e-5, 1.5e-9)
    with pytest.raises(UserError, match=r"5 to 5 s, though .* from 256 to 65520: only the floor .*21x60x104 at batch"):
        fit_cost_model(steps(floor))


def test_batch_sizes_that_differ_on_the_floor_alone_are_told_with_the_point_to_add():
    grid = [("1x32x32", 1), ("1x32x32", 2), ("1x32x32", 4), *((shape, 1) for shape in list(SHAPES)[2:])]
    found, few = describe_measurements(steps(Roofline(0.15, 0.001, 3e-5, 1.5e-9), grid=grid))
    assert "(0.15 s) have batch size 1," in found and found.endswith("Add 5x60x104 at batch size 2.")
    assert few.startswith("The law is a guess: it follows 6 points")
    assert describe_measurements(steps()) == []


def test_a_law_of_fewer_than_nine_points_is_called_a_guess_with_what_to_add_and_repeats_do_not_count():
    (found,) = describe_measurements([*steps(grid=GRID[3:11]), *steps(grid=GRID[3:11])])
    assert found == (
        "The law is a guess: it follows 8 points (shape and batch size) of 3 shapes, not 9 or more. Add 1: "
        "recipes/benchmark_shapes.py goes on in the same --output_dir, with a larger --max_points."
    )
    assert describe_measurements(steps(grid=GRID[3:12])) == []


def test_one_shape_above_the_floor_is_told():
    grid = [("1x32x32", 1), ("1x32x32", 4), ("21x60x104", 1), ("21x60x104", 2)]
    found, few = describe_measurements(steps(grid=grid))
    assert few.startswith("The law is a guess: it follows 4 points (shape and batch size) of 2 shapes, not 9 or more.")
    assert "have the shape 21x60x104, so linear and quadratic work cannot be told apart. Add another shape" in found


def peaks(*points):
    return [Measurement("1x8x8", 16, batch, 1.0, float(gib)) for batch, gib in points]


def test_of_repeated_peaks_the_higher_is_planned_with_and_named_in_any_order_of_the_lines():
    for order in itertools.permutations(peaks((1, 4), (8, 40), (8, 44), (4, 20))):
        assert fit_memory_model(order).gib(8, 16) == pytest.approx(44)
        assert describe_measurements(order)[0] == (
            "1x8x8 at batch size 8 was measured at 40.00 to 44.00 GiB; the higher is used."
        )


def test_a_failure_below_a_success_is_believed_and_named():
    points = [*peaks((1, 10), (4, 40), (8, 70)), Measurement("5x8x8", 80, 1, 0.0, 30.0, oom=True)]
    assert fit_memory_model(points).max_tokens(70.0, 16) < 80
    assert describe_measurements(points)[0] == (
        "5x8x8 at batch size 1 ran out of memory, though 1x8x8 at batch size 8, which is larger, did not; the failure "
        "is believed."
    )


def test_a_point_that_ran_out_of_memory_is_never_within_a_limit_of_that_gpu():
    points = [*peaks((1, 60), (4, 64), (8, 70)), Measurement("1x8x8", 16, 9, 0.0, 30.0, oom=True)]
    assert fit_memory_model(points).max_tokens(72.0, 16) >= 9 * 16, "its peak alone would let it in"
    assert fit_memory_model(points, gpu_memory_gib=80.0).max_tokens(72.0, 16) < 9 * 16


def test_memory_that_fragmentation_wastes_is_said_of_large_steps_alone():
    points = [
        Measurement("1x32x32", 256, batch, float(TRUE.seconds(batch, 256)), gib, reserved_gib=held)
        for batch, gib, held in ((1, 2.0, 4.0), (64, 20.0, 21.0), (128, 38.0, 39.0))
    ]
    points.append(Measurement("5x60x104", 7800, 8, float(TRUE.seconds(8, 7800)), 60.0, reserved_gib=65.0))
    assert not [words for words in describe_measurements(points) if "allocator" in words]
    points.append(Measurement("5x60x104", 7800, 7, float(TRUE.seconds(7, 7800)), 50.0, reserved_gib=60.0))
    assert describe_measurements(points)[0].startswith(
        "At 5x60x104 at batch size 7 the allocator held 60.0 GiB for a peak of 50.0: more than plans keep free."
    )


def test_hundreds_of_lines_take_no_more_fits_than_some_of_each_shape(monkeypatch):
    calls, fit_form = [], fit.fit_form
    monkeypatch.setattr(fit, "fit_form", lambda kind, steps: calls.append(kind) or fit_form(kind, steps))
    law, sizes = PowerLaw(0.1, 1e-5, 1.2), np.arange(1, 41)
    points = [(tokens, int(batch)) for tokens in (1000, 4000, 16000) for batch in sizes]
    found = fit_cost_model(
        [Measurement("1x2x2", s, b, float(law.seconds(b, s)), 0.0) for s, b in points], ["power_law"]
    )
    assert found.model.p == pytest.approx(1.2)
    assert len(calls) == 1 + 8 + 1 + 8  # all points, and each shape left out: the outer ones in eight groups
