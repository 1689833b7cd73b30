"""Is a law found again from the log of a training run, and a log that tells too little refused?"""

import json
import re
import tracemalloc

import numpy as np
import pytest
from support.training_logs import BATCH_SIZES, tokens_of, write_log

from adaptiveload_hf.buckets.cost import Additive, Roofline
from adaptiveload_hf.buckets.fit import find_outliers
from adaptiveload_hf.buckets.shapes import TokenGeometry
from adaptiveload_hf.buckets.training_log import apportion_seconds, fit_training_log, read_training_log
from adaptiveload_hf.errors import UserError

LAWS = {"roofline": Roofline(0.45, 0.001, 3.2e-5, 1.5e-9), "additive": Additive(0.3, 0.01, 3e-5, 1.5e-9)}


def read(path):
    return read_training_log(path, TokenGeometry())


@pytest.mark.parametrize("kind", LAWS)
def test_a_law_is_found_again_from_mixed_micro_steps_with_two_percent_noise(tmp_path, kind):
    log = read(write_log(tmp_path / "metrics.jsonl", LAWS[kind], steps=120))
    fit = fit_training_log(log)
    points = [(b, tokens_of(shape)) for shape, (_, most) in BATCH_SIZES.items() for b in (most // 2, most)]
    batch, tokens = np.array(points).T
    assert np.abs(fit.model.seconds(batch, tokens) / LAWS[kind].seconds(batch, tokens) - 1).max() < 0.05
    assert {outlier.name for outlier in find_outliers(fit)} == {"step 37", "step 74", "step 111"}
    usual = np.median(log.steps.seconds) / 2
    for measurement in apportion_seconds(log, fit):
        true = float(LAWS[kind].seconds(measurement.batch_size, measurement.tokens))
        assert abs(measurement.seconds - true) < 0.15 * max(true, usual)


def test_warm_up_new_shapes_waits_and_other_settings_are_left_out_and_said(tmp_path):
    path = write_log(tmp_path / "metrics.jsonl", LAWS["roofline"], steps=30)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[20]["data_wait_seconds"] = 0.5 * lines[20]["seconds"]
    lines[21]["micro_batches"] = lines[21]["micro_batches"][:1]
    lines[22]["micro_batches"][0][0] = {"shape": "3x60x104", "batch_size": 1}
    lines[23]["seconds"] = -1.0
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 31, "sec')
    log = read(path)
    said = " ".join(log.left_out)
    for words in ("line 24 is left out: seconds is -1.0", "line 31 is left out", "2 steps are left out: the first 2."):
        assert words in said
    for words in ("waited over 5% of their time", "a shape came for the first time", "other ranks or accumulation"):
        assert f": {words}" in said
    assert not {"step 1", "step 2", "step 21", "step 22", "step 23", "step 24"} & set(log.steps.names)


def test_broken_lines_are_named_by_what_is_wrong_and_the_first_ones_stand_for_many(tmp_path):
    path = write_log(tmp_path / "metrics.jsonl", LAWS["roofline"], steps=30)
    lines = path.read_text().splitlines()

    def change(line, **fields):
        return json.dumps({**json.loads(line), **fields})

    ranks = "micro_batches must list shape and batch_size of each rank, for each micro-step."
    for broken, words in {
        change(lines[5], step=float("inf")): "it must be JSON with the numbers step and seconds, but: cannot convert",
        change(lines[5], step=None): "it must be JSON with the numbers step and seconds",
        "[" * 100_000: "it must be JSON with the numbers step and seconds",
        change(lines[5], seconds=1e300): r"seconds is 1e\+300",
        change(lines[5], micro_batches=None): ranks,
        change(lines[5], micro_batches=[[{"shape": "1x60x104", "batch_size": 10**400}] * 2]): ranks,
    }.items():
        path.write_text("\n".join([*lines, broken]))
        assert re.fullmatch(f"metrics.jsonl line 31 is left out: {words}.*", read(path).left_out[0])
    path.write_text("\n".join([*lines, *["{}"] * 9]))
    assert [words[:27] for words in read(path).left_out[:4]] == [
        *(f"metrics.jsonl line {number} is le" for number in (31, 32, 33)),
        "So are 6 more lines.",
    ]


def test_a_log_of_another_geometry_is_refused_with_both_numbers_of_tokens(tmp_path):
    longer = {"tokens": lambda shape: tokens_of(shape) + 333}
    path = write_log(tmp_path / "metrics.jsonl", LAWS["additive"], steps=30, **longer)
    with pytest.raises(
        UserError, match=r"had \d+ tokens in step \d+ of the log, but patch size 1x2x2 and 0 text tokens"
    ):
        read(path)
    assert read_training_log(path, TokenGeometry(text_tokens=333)).says_tokens
    path = write_log(tmp_path / "metrics.jsonl", LAWS["additive"], steps=30, tokens=None)
    assert not read(path).says_tokens


def test_a_step_that_was_waiting_from_end_to_end_is_one_that_waited(tmp_path):
    path = write_log(tmp_path / "metrics.jsonl", LAWS["additive"], steps=30)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[20]["data_wait_seconds"] = lines[20]["seconds"]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert "1 steps are left out: waited over 5% of their time for data." in read(path).left_out


def test_a_log_that_leaves_the_cost_open_is_refused_with_what_it_leaves_open(tmp_path):
    whole = {shape: (most, most) for shape, (_, most) in BATCH_SIZES.items()}
    log = read(write_log(tmp_path / "metrics.jsonl", LAWS["additive"], steps=100, ranks=4, batch_sizes=whole))
    with pytest.raises(UserError, match=r"leaves the cost of 1x60x104 at batch size \d+ .*other batch sizes"):
        fit_training_log(log)


def test_a_log_of_many_ranks_is_held_without_its_text(tmp_path):
    path = write_log(tmp_path / "metrics.jsonl", Roofline(0.1, 1e-3, 2e-5, 1e-9), steps=200, ranks=64)
    tracemalloc.start()
    read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * path.stat().st_size  # with the text, and each shape anew, three times


def test_a_log_of_one_shape_is_refused(tmp_path):
    log = read(write_log(tmp_path / "metrics.jsonl", LAWS["additive"], steps=30, batch_sizes={"5x60x104": (1, 8)}))
    with pytest.raises(UserError, match=r"has \['5x60x104'\] only\. Train on your smallest and your largest"):
        fit_training_log(log)


def test_too_few_steps_are_refused_with_why_the_others_do_not_count(tmp_path):
    path = write_log(tmp_path / "metrics.jsonl", LAWS["additive"], steps=30, waited=0.2)
    with pytest.raises(UserError, match=r"at least 12 .* steps, but .* has 0\..*waited over 5% .*num_workers"):
        read(path)
    with pytest.raises(UserError, match="no such file"):
        read(tmp_path / "absent.jsonl")
