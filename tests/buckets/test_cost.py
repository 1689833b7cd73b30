"""The cost and memory fits: right on real and made-up steps, and clear about what they lack."""

import json
from pathlib import Path

import numpy as np
import pytest

from adaptiveload_hf.buckets.cost import (
    Additive,
    Measurement,
    MemoryModel,
    PowerLaw,
    Roofline,
    cost_model_from_dict,
    read_measurements,
)
from adaptiveload_hf.buckets.fit import fit_cost_model
from adaptiveload_hf.buckets.memory import fit_memory_model
from adaptiveload_hf.errors import UserError

H200 = Path(__file__).parents[1] / "data" / "h200_wan_steps.jsonl"
GRID = [(b, s) for s in (256, 1560, 7800, 14040, 32760) for b in (1, 2, 4, 8) if b * s < 70_000]
TRUE = {
    "power_law": PowerLaw(0.2, 3e-6, 1.4),
    "additive": Additive(0.3, 0.01, 3e-5, 1.5e-9),
    "roofline": Roofline(0.45, 0.001, 3.2e-5, 1.5e-9),
}
OTHERS = {  # other models and machines: a law, and how sharp its knee is (None: as sharp as the form has it)
    "14B, sharded over a slow network": (Roofline(2.0, 0.01, 2.4e-4, 4.6e-9, a=0.3), None),
    "short attention": (Roofline(0.25, 0.004, 5e-5, 2e-10, a=0.05), None),
    "attention alone": (Roofline(0.4, 0.0, 1e-6, 5e-9), None),
    "no floor": (Roofline(0.0, 0.01, 3e-5, 1.5e-9, a=0.1), None),
    "work that overlaps launching only in part": (Roofline(0.4, 0.002, 3e-5, 1.5e-9, a=0.035), 6),
}


def steps(model, noise=0.0, seed=0, grid=GRID):
    random = np.random.default_rng(seed)
    return [
        Measurement(f"{s}x2x2", s, b, float(model.seconds(b, s) * np.exp(noise * random.standard_normal())), 1.0)
        for b, s in grid
    ]


@pytest.fixture(scope="module")
def h200():
    measurements, problems = read_measurements(H200)
    assert len(measurements) == 23 and not problems
    return measurements


@pytest.fixture(scope="module")
def h200_fit(h200):
    return fit_cost_model(h200)


def errors(model, measurements):
    return np.array([abs(model.seconds(m.batch_size, m.tokens) / m.seconds - 1) for m in measurements])


def test_on_real_h200_steps_the_roofline_form_wins_and_is_right_above_its_floor(h200, h200_fit):
    assert h200_fit.model.kind == "roofline"
    above = [m for m in h200 if m.batch_size * h200_fit.model.seconds_per_sample(m.tokens) > h200_fit.model.floor]
    assert len(above) == 13
    assert np.median(errors(h200_fit.model, above)) <= 0.01
    assert errors(h200_fit.model, above).max() <= 0.03
    assert np.median(errors(h200_fit.power_law, above)) > 0.09
    assert errors(h200_fit.power_law, above).max() > 0.4


def test_real_h200_steps_of_shapes_between_the_others_are_predicted_by_a_fit_that_did_not_see_them(h200):
    unseen = []
    for tokens in sorted({m.tokens for m in h200})[1:-1]:
        fit = fit_cost_model([m for m in h200 if m.tokens != tokens], kinds=["roofline"]).model
        out = [m for m in h200 if m.tokens == tokens]
        above = [m for m in out if m.batch_size * fit.seconds_per_sample(tokens) > fit.floor]
        unseen.extend(errors(fit, above))
    assert len(unseen) == 12
    assert np.median(unseen) <= 0.025


def test_every_candidate_reports_its_median_maximum_and_unseen_error(h200, h200_fit):
    assert set(h200_fit.candidates) == {"power_law", "additive", "roofline"}
    for candidate in h200_fit.candidates.values():
        found = errors(candidate.model, h200)
        assert candidate.median_error == pytest.approx(np.median(found))
        assert candidate.max_error == pytest.approx(found.max())
    assert h200_fit.model == min(h200_fit.candidates.values(), key=lambda c: c.leave_one_out_error).model
    assert h200_fit.power_law == h200_fit.candidates["power_law"].model


def test_the_fit_does_not_depend_on_the_order_of_the_lines(h200, h200_fit):
    assert fit_cost_model(h200[::-1], kinds=["roofline"]).model == h200_fit.candidates["roofline"].model


@pytest.mark.parametrize("kind", TRUE)
def test_a_law_is_found_again_from_steps_with_one_percent_noise_and_a_stray(kind):
    measurements = steps(TRUE[kind], noise=0.01)
    stray = measurements[10]
    measurements[10] = Measurement(stray.shape, stray.tokens, stray.batch_size, 2 * stray.seconds, 1.0)
    fit = fit_cost_model(measurements)
    assert fit.model.kind == kind
    batch, tokens = np.array(GRID).T
    assert np.abs(fit.model.seconds(batch, tokens) / TRUE[kind].seconds(batch, tokens) - 1).max() < 0.04


def test_of_three_shapes_the_right_form_is_chosen_though_none_could_be_fitted_without_an_outer_one():
    law, random = Roofline(0.8, 3e-3, 2e-5, 1.5e-9, a=0.08), np.random.default_rng(0)
    points = {256: (1, 32, 128, 512), 1024: (16, 33, 66), 4096: (1, 4, 11, 23)}
    grid = [(batch, tokens) for tokens, batches in points.items() for batch in batches]
    measured = []
    for batch, tokens in grid:
        noise = (0.06 if law.seconds(batch, tokens) == law.floor else 0.008) * random.standard_normal()
        seconds = float(law.seconds(batch, tokens)) * (1 + noise)
        measured.append(Measurement(f"{tokens}x2x2", tokens, batch, seconds, 0.0))
    fitted = fit_cost_model(measured).model
    batch, tokens = np.array(grid).T
    assert fitted.kind == "roofline"
    assert np.abs(fitted.seconds(batch, tokens) / law.seconds(batch, tokens) - 1).max() < 0.02


@pytest.mark.parametrize("name", OTHERS)
def test_laws_of_other_models_are_predicted_to_one_percent_above_the_floor_whatever_floor_steps_do(name):
    law, knee = OTHERS[name]
    random = np.random.default_rng(0)

    def seconds(batch, tokens):
        if knee is None:
            return law.seconds(batch, tokens)
        return (law.floor**knee + (law.a + batch * law.seconds_per_sample(tokens)) ** knee) ** (1 / knee)

    measured = []
    for batch, tokens in GRID:
        on_floor = law.a + batch * law.seconds_per_sample(tokens) <= law.floor
        noise = 0.15 * abs(random.standard_normal()) if on_floor else 0.005 * random.standard_normal()
        measured.append(Measurement(f"{tokens}x2x2", tokens, batch, float(seconds(batch, tokens) * (1 + noise)), 0.0))
    fitted = fit_cost_model(measured).model
    batch, tokens = np.array([(b, s) for s in (1560, 7800, 20280, 32760) for b in (1, 2, 8) if b * s < 70_000]).T
    true = seconds(batch, tokens)
    off = np.abs(fitted.seconds(batch, tokens) / true - 1)[true > 1.1 * law.floor]
    assert np.median(off) <= 0.01
    assert off.max() <= 0.06


def test_a_roofline_saved_before_it_had_a_fixed_part_is_read():
    parameters = {"floor": 0.4, "c0": 0.001, "c1": 3e-5, "c2": 1.5e-9}
    assert cost_model_from_dict({"kind": "roofline", "parameters": parameters}) == Roofline(**parameters, a=0.0)
    with pytest.raises(UserError, match="The roofline cost model has the non-negative parameters"):
        cost_model_from_dict({"kind": "roofline", "parameters": {"floor": 0.4, "c0": 0.001, "c1": 3e-5}})


def test_parameters_are_never_negative():
    falling = [Measurement(f"{s}x2x2", s, b, 1.0 / s + 0.01 * b, 1.0) for b, s in GRID]
    for candidate in fit_cost_model(falling).candidates.values():
        assert min(candidate.model.parameters.values()) >= 0


def test_two_shapes_are_enough():
    two = steps(TRUE["additive"], grid=[(b, s) for s in (256, 7800) for b in (1, 2, 4)])
    assert errors(fit_cost_model(two).model, two).max() < 0.02


def test_one_shape_is_refused_and_the_missing_ones_are_named():
    with pytest.raises(UserError, match=r"at least two shapes .* \[7800\].*smallest and your largest"):
        fit_cost_model(steps(TRUE["additive"], grid=[(b, 7800) for b in (1, 2, 3, 4)]))


def test_too_few_points_are_refused_and_listed():
    with pytest.raises(UserError, match=r"4 different .*\(256, 1\), \(7800, 1\), \(7800, 2\)"):
        fit_cost_model(steps(TRUE["additive"], grid=[(1, 256), (1, 7800), (2, 7800)]))
    with pytest.raises(UserError, match="fitted into memory, but there are none"):
        fit_cost_model([Measurement("1x8x8", 16, 1, 0.0, 0.0, oom=True)])


def test_one_batch_size_only_is_refused():
    with pytest.raises(UserError, match=r"batch size \[1\] .*larger batch size: 256x2x2 at batch size 4"):
        fit_cost_model(steps(TRUE["additive"], grid=[(1, s) for s in (256, 1560, 7800, 14040)]))


def test_points_that_ran_out_of_memory_are_left_out_of_the_time_fit():
    measurements = steps(TRUE["additive"])
    oom = Measurement("99x2x2", 99_000, 9, 0.0, 0.0, oom=True)
    assert fit_cost_model([oom, *measurements], ["additive"]).model == fit_cost_model(measurements, ["additive"]).model


def test_of_forms_that_predict_new_shapes_alike_the_one_that_knows_the_floor_is_used():
    """Real steps of which few are on the floor: the error on shapes left out, a median, hardly sees those."""
    measured, problems = read_measurements(H200.parents[2] / "recipes" / "results" / "wan21_1.3b_benchmark.jsonl")
    assert not problems and len(measured) == 12
    fit = fit_cost_model(measured)
    assert fit.candidates["additive"].leave_one_out_error < fit.candidates["roofline"].leave_one_out_error
    assert fit.model.kind == "roofline" and fit.candidates["roofline"].max_error < 0.25
    shortest = min(measured, key=lambda m: m.seconds)
    assert fit.candidates["additive"].model.seconds(1, shortest.tokens) < shortest.seconds / 3


def test_an_unknown_form_is_refused():
    with pytest.raises(UserError, match="kinds must be 'all' or some of"):
        fit_cost_model(steps(TRUE["additive"]), kinds=["cubic"])


@pytest.mark.parametrize("kind", TRUE)
def test_the_largest_batch_is_the_last_within_the_limit(kind):
    model = TRUE[kind]
    for tokens in (256, 1560, 32760):
        for batch in (1, 2, 3, 7, 113):
            exact = float(model.seconds(batch, tokens))
            limits = (exact, exact * 1.0001) if exact > model.parameters.get("floor", 0) else ()
            for limit in limits:
                found = model.largest_batch(tokens, limit)
                assert model.seconds(found, tokens) <= limit < model.seconds(found + 1, tokens)
        assert model.largest_batch(tokens, 0.01) == 0
        assert model.largest_batch(tokens, 1e300) == (1 << 31) - 1
    many = np.array([256, 1560, 32760])
    for seconds in (0.01, 1.0, 30.0):
        assert model.largest_batch(many, seconds).tolist() == [model.largest_batch(s, seconds) for s in many]


@pytest.mark.parametrize("slope", [1e-20, 1e-30])
def test_the_largest_batch_of_a_cost_that_hardly_grows_is_found_without_counting_up_to_it(slope):
    model = Additive(1.0, 0.0, slope, 0.0)
    found = model.largest_batch(100, 1.0)
    assert model.seconds(found, 100) == 1.0
    assert found == (1 << 31) - 1 or model.seconds(found + 1, 100) > 1.0


def test_a_cost_that_does_not_grow_has_no_largest_batch():
    with pytest.raises(UserError, match="does not grow with the batch size"):
        Additive(1.0, 0.0, 0.0, 0.0).largest_batch(100, 2.0)


def test_seconds_broadcast_over_batch_sizes_and_tokens():
    for model in TRUE.values():
        found = model.seconds(np.array([[1], [2]]), np.array([256, 1560, 7800]))
        assert found.shape == (2, 3)
        assert found[1, 2] == pytest.approx(model.seconds(2, 7800))


def test_a_cost_model_survives_json():
    for model in TRUE.values():
        saved = json.loads(json.dumps({"kind": model.kind, "parameters": model.parameters}))
        assert cost_model_from_dict(saved) == model


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"kind": "cubic", "parameters": {}}, "found 'cubic'"),
        ({"kind": "power_law", "parameters": {"a": 1, "b": 2}}, "parameters"),
        ({"kind": "power_law", "parameters": {"a": 1, "b": -2, "p": 1}}, "non-negative"),
        ({"kind": "power_law", "parameters": {"a": 1, "b": "2", "p": 1}}, "non-negative"),
        (
            {"kind": "power_law", "parameters": {"a": 0, "b": 0, "p": 1}},
            "must make a step take time, and more samples no less, but by",
        ),
        (
            {"kind": "additive", "parameters": {"a": 1e-200, "c0": 0, "c1": 0, "c2": 1e-200}},
            "must make a step take time, and more samples no less, but by",
        ),
    ],
)
def test_a_damaged_cost_model_is_refused(saved, message):
    with pytest.raises(UserError, match=message):
        cost_model_from_dict(saved)


def test_a_measurement_survives_its_line():
    measurement = Measurement("21x60x104", 32760, 2, 5.3, 13.9, (5.29, 5.3), False)
    assert Measurement.from_json(measurement.to_json()) == measurement


@pytest.mark.parametrize(
    "line",
    [
        '{"shape": "1x8x8", "tokens": 16, "batch_si',
        "[1, 2]",
        "7",
        '{"shape": "1x8x8", "tokens": 16}',
        '{"shape": "1x8x8", "tokens": 16, "batch_size": 1, "seconds": -1.0, "peak_gib": 0.0}',
        '{"shape": "1x8x8", "tokens": 0, "batch_size": 1, "seconds": 1.0, "peak_gib": 0.0}',
        '{"shape": "1x8x8", "tokens": 16, "batch_size": 1, "seconds": NaN, "peak_gib": 0.0}',
        '{"shape": "1x8x8", "tokens": 16, "batch_size": 1, "seconds": 1.0, "peak_gib": 0.0, "colour": 1}',
        '{"shape": "1x8x8", "tokens": 16, "batch_size": 1.5, "seconds": 1.0, "peak_gib": 0.0}',
        '{"shape": "1x8x8", "tokens": 16, "batch_size": 1, "seconds": "1.0", "peak_gib": 0.0}',
        '{"shape": "1x8x8", "tokens": 16, "batch_size": 1, "seconds": 1e300, "peak_gib": 0.0}',
        '{"shape": "1x8x8", "tokens": 16, "batch_size": 1, "seconds": 1.0, "peak_gib": 0.0, "oom": "yes"}',
        '{"shape": "1x8x8", "tokens": 16, "batch_size": 1, "seconds": 1.0, "peak_gib": 0.0, "rank_seconds": "ab"}',
        '{"shape": "1x8x8", "tokens": 16, "batch_size": 1, "seconds": 1.0, "peak_gib": NaN}',
        '{"shape": "1x8x8", "tokens": 16, "batch_size": 1, "seconds": 1.0, "peak_gib": 0.0, "rank_seconds": [1, NaN]}',
        '{"shape": "8x8", "tokens": 16, "batch_size": 1, "seconds": 1.0, "peak_gib": 0.0}',
    ],
)
def test_bad_lines_are_named_by_number_and_the_rest_is_kept(tmp_path, line):
    good = Measurement("1x8x8", 16, 1, 1.0, 0.0).to_json()
    path = tmp_path / "measurements.jsonl"
    path.write_text(f"{good}\n\n{line}\n{good}\n")
    measurements, problems = read_measurements(path)
    assert len(measurements) == 2
    assert len(problems) == 1 and "line 3: " in problems[0]


def test_absent_measurements_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"Expected a measurements\.jsonl, but .* is no file"):
        read_measurements(tmp_path / "measurements.jsonl")


def test_the_memory_line_is_never_below_a_measured_peak(h200):
    memory = fit_memory_model(h200)
    predicted = np.array([memory.gib(m.batch_size, m.tokens) for m in h200])
    measured = np.array([m.peak_gib for m in h200])
    assert (predicted >= measured - 1e-9).all()
    assert np.median(predicted / measured) < 1.1


def test_max_tokens_is_the_last_that_fits():
    memory = MemoryModel(2.0, 1e-4)
    tokens = memory.max_tokens(10.0, 16)
    assert memory.gib(1, tokens) <= 10.0 < memory.gib(1, tokens + 2)
    assert memory.max_tokens(1.9, 16) == 0


def test_without_measured_peaks_there_is_no_memory_model():
    with pytest.raises(UserError, match="peak_gib at two or more"):
        fit_memory_model([Measurement("1x8x8", 16, b, 1.0, 0.0) for b in (1, 2)])
