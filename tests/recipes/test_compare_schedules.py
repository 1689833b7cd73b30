"""Do all arms of a comparison train the same samples, and do prediction, numbers and picture come out of one run?"""

import contextlib
import json
import sys

import accelerate
import compare_schedules
import lanes_picture
import numpy as np
import pytest
import step_memory
import torch
from random_training import KERNELS, RandomTraining
from schedule_arms import Arm, scaled, schedule_of
from support.accelerators import FSDP2, fresh_accelerate, one_rank
from support.launch import ROOT
from support.prepared import save_config

from adaptiveload_hf import BucketConfig, LatentShape, TokenGeometry, UserError, fit_cost_model, make_accelerator
from adaptiveload_hf.buckets.cost import Measurement, read_measurements
from adaptiveload_hf.buckets.memory import fit_memory_model
from adaptiveload_hf.buckets.simulate import simulate
from adaptiveload_hf.commands.arguments import read_samples

COUNTS = {"1x4x4": 9, "2x4x8": 6, "5x4x8": 5}
ARMS = ("equal_token/none/eager", "equal_token/same_bucket/eager", "dual/step/patched")
WAN = {
    "_class_name": "WanTransformer3DModel",
    "num_attention_heads": 1,
    "attention_head_dim": 12,
    "text_dim": 8,
    "freq_dim": 16,
    "ffn_dim": 16,
    "num_layers": 2,
    "rope_max_seq_len": 64,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return BucketConfig.from_pretrained(save_config(tmp_path_factory.mktemp("law"), COUNTS))


def schedule(arm: str, config, counts=COUNTS, **run):
    shapes = {LatentShape.parse(shape): count for shape, count in counts.items()}
    return schedule_of(Arm.parse(arm), shapes, config, m_mem_tokens=48, seed=0, **run)


@pytest.mark.parametrize("world_size, accumulation", [(1, 1), (2, 4), (3, 2), (8, 1)])
def test_same_bucket_steps_hold_one_bucket_and_every_sample_once(config, world_size, accumulation):
    run = {"world_size": world_size, "gradient_accumulation_steps": accumulation}
    plan, made = schedule("equal_token/same_bucket/eager", config, **run)
    buckets = made.bucket.reshape(-1, world_size)
    assert (buckets == buckets[:, :1]).all()
    assert made.num_micro_steps % accumulation == 0
    real = np.repeat(made.loss_weight > 0, made.sizes)
    assert sorted(made.sample_order[real].tolist()) == list(range(20))
    bucket_of_sample = np.repeat(np.arange(3), [bucket.count for bucket in plan.buckets])
    assert (bucket_of_sample[made.sample_order] == np.repeat(made.bucket, made.sizes)).all()
    assert (made.sizes <= np.array([bucket.batch_size for bucket in plan.buckets])[made.bucket]).all()
    assert made.loss_weight.mean() == pytest.approx(1)


@pytest.mark.parametrize("balance", ["none", "step", "window:8", "auto"])
def test_two_limits_are_chosen_for_the_arms_own_dealing_and_beat_one(balance):
    measurements, _ = read_measurements(ROOT / "tests" / "data" / "h200_fsdp2_steps.jsonl")
    law = BucketConfig.from_measurements(measurements, model={}, environment={}, geometry=TokenGeometry())
    counts = scaled(read_samples(ROOT / "recipes" / "runs" / "mixed_shapes_49_frames.json").counts, 16_000)
    run = {"m_mem_tokens": 40_560, "world_size": 8, "gradient_accumulation_steps": 4, "seed": 0}
    arms = [Arm(policy, balance, "eager") for policy in ("equal_token", "equal_time", "dual")]
    made = {arm.policy: schedule_of(arm, counts, law, **run) for arm in arms}
    *others, dual = (simulate(schedule).epoch_seconds for _, schedule in made.values())
    assert dual <= 1.001 * min(others)
    assert made["dual"][0].balance == balance
    # Two clips of the longest shape in a batch pay where it meets another such, and cost dearly where it does not.
    assert made["dual"][0].batch_size_of("13x60x104") == (2 if balance == "window:8" else 1)
    # auto: step is 0.1% slower than window:2, whose batches of that shape would be of two.
    assert made["dual"][1].balance == ("step" if balance == "auto" else balance)


def test_fewer_samples_keep_their_proportions_and_every_shape():
    counts = {LatentShape(1, 4, 4): 900, LatentShape(2, 4, 4): 99, LatentShape(3, 4, 4): 1}
    assert list(scaled(counts, 100).values()) == [90, 10, 1]


@pytest.mark.parametrize("text", ["dual/auto", "dual/auto/fast", "patched"])
def test_an_arm_of_another_form_is_refused(text):
    with pytest.raises(UserError, match=r"POLICY/BALANCE/KERNELS.*but found"):
        Arm.parse(text)


def set_arguments(monkeypatch, tmp_path, *extra):
    (tmp_path / "wan.json").write_text(json.dumps(WAN))
    monkeypatch.setattr(sys, "argv", ["", "--config", f"{tmp_path}/wan.json", "--output_dir", f"{tmp_path}", *extra])


def test_a_run_measures_what_was_predicted_and_its_lanes_are_drawn(tmp_path, config, monkeypatch, capsys):
    (tmp_path / "shapes.json").write_text(json.dumps(COUNTS))
    config.save_pretrained(tmp_path / "law")
    what = (
        "--shapes",
        f"{tmp_path}/shapes.json",
        "--bucket_config",
        f"{tmp_path}/law",
        "--m_mem_tokens",
        "96",
        "--arms",
        *ARMS,
    )
    set_arguments(monkeypatch, tmp_path, *what, "--predict", "1")
    compare_schedules.main()
    with fresh_accelerate(**one_rank(**FSDP2)):
        set_arguments(monkeypatch, tmp_path, *what)
        compare_schedules.main()
    predicted = json.loads((tmp_path / "predicted.json").read_text())["arms"]
    measured = json.loads((tmp_path / "compare.json").read_text())["arms"]
    assert [row["arm"] for row in measured] == list(ARMS)
    for before, row in zip(predicted, measured):
        beforehand = {name: before[name] for name in before if name not in ("micro_batches", "starts")}
        assert row | beforehand == row, "what was predicted beforehand stands in the result"
        assert row["samples"] == 20
        assert row["samples_per_second"] == pytest.approx(20 / row["seconds"])
        assert len(row["micro_batches"]) == row["micro_steps"] == len(row["starts"][0]) - 1
        assert all(block > 0 for _, _, block in row["micro_batches"])
    assert "achieved_efficiency" not in measured[0], "no law was measured with eager blocks"
    error = measured[2]["predicted"]["epoch_seconds"] / measured[2]["seconds"] - 1
    assert measured[2]["prediction_error"] == pytest.approx(error)
    assert "WanTransformerBlock   | 2 " in capsys.readouterr().err, "the patch report of the one patched arm"

    picture = ["", "--comparison", f"{tmp_path}/compare.json", "--output", f"{tmp_path}/lanes.png", "--arms"]
    monkeypatch.setattr(sys, "argv", [*picture, ARMS[0], ARMS[2]])
    lanes_picture.main()
    assert (tmp_path / "lanes.png").read_bytes().startswith(b"\x89PNG")
    picture[2:3] = [f"{tmp_path}/predicted.json", f"{tmp_path}/compare.json"]
    monkeypatch.setattr(sys, "argv", [*picture, ARMS[1], ARMS[2]])
    lanes_picture.main()
    monkeypatch.setattr(sys, "argv", [*picture, "dual/none/eager"])
    with pytest.raises(UserError, match=r"there are the arms equal_token/none/eager.*but not dual/none/eager"):
        lanes_picture.main()


def test_a_law_that_is_taken_beyond_its_shapes_is_named_with_them(tmp_path, config, monkeypatch, capsys):
    config.save_pretrained(tmp_path / "law")
    (tmp_path / "shapes.json").write_text(json.dumps(COUNTS | {"9x4x8": 4}))
    law = ("--bucket_config", f"{tmp_path}/law", "--m_mem_tokens", "96", "--predict", "1", "--arms", ARMS[2])
    set_arguments(monkeypatch, tmp_path, "--shapes", f"{tmp_path}/shapes.json", *law)
    compare_schedules.main()
    said = "The law of patched blocks was measured from S = 4 to 40; predictions for 9x4x8 (S = 72) are extrapolated."
    assert said in capsys.readouterr().err
    (tmp_path / "shapes.json").write_text(json.dumps(COUNTS))
    compare_schedules.main()
    assert "extrapolated" not in capsys.readouterr().err


def test_kernels_of_an_arm_are_gone_after_it(tmp_path, monkeypatch):
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        set_arguments(monkeypatch, tmp_path, "--points", "1x4x4=1")
        training = RandomTraining(make_accelerator(), step_memory.parse_args())
        blocks = training.model.blocks
        before = [block.forward for block in blocks]
        for name in KERNELS:
            with training.kernels(name):
                assert ("forward" in vars(blocks[1])) == (name != "eager")
            assert [block.forward for block in blocks] == before
            assert not any(block._forward_pre_hooks for block in blocks)


def test_a_replay_on_one_process_adds_up_the_slowest_ranks(tmp_path, config, monkeypatch):
    (tmp_path / "shapes.json").write_text(json.dumps(COUNTS))
    config.save_pretrained(tmp_path / "law")
    what = ("--shapes", f"{tmp_path}/shapes.json", "--bucket_config", f"{tmp_path}/law", "--m_mem_tokens", "48")
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        set_arguments(monkeypatch, tmp_path, *what, "--replay", "1", "4", "--arms", ARMS[0], ARMS[1])
        compare_schedules.main()
    rows = json.loads((tmp_path / "replay.json").read_text())["arms"]
    assert [(row["arm"], row["ranks"]) for row in rows] == [(arm, ranks) for ranks in (1, 4) for arm in ARMS[:2]]
    timed = {}
    for row in rows:
        assert row["samples"] == 20
        seconds = np.array([seconds for _, _, seconds in row["micro_batches"]]).reshape(-1, row["ranks"])
        assert row["seconds"] == pytest.approx(seconds.max(1).sum(), rel=1e-3)
        assert row["measured_balance_efficiency"] == pytest.approx(
            seconds.mean(1).sum() / seconds.max(1).sum(), rel=1e-3
        )
        for shape, size, each in row["micro_batches"]:
            assert timed.setdefault((shape, size), each) == each, "one time of each size, in every arm"


def test_step_memory_tries_both_kernels_with_and_without_the_checkpoint(tmp_path, monkeypatch):
    points = ("--points", "1x4x4=1", "2x4x8=2", "--num_layers", "1")
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        set_arguments(monkeypatch, tmp_path, *points, "--both_checkpointings")
        step_memory.main()
    result = json.loads((tmp_path / "step_memory.json").read_text())
    assert result["environment"]["num_layers"] == 1
    rows = [(r["checkpointing"], r["kernels"], r["shape"], r["batch_size"], r["tokens"]) for r in result["rows"]]
    sizes = (("1x4x4", 1, 4), ("2x4x8", 2, 16))
    assert rows == [(on, by, *size) for on in (True, False) for by in ("eager", "patched") for size in sizes]
    assert all(row["median_seconds"] >= row["seconds"] > 0 and not row["oom"] for row in result["rows"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_step_memory_keeps_what_it_measured_when_a_rank_runs_out_of_memory(tmp_path, monkeypatch, ranks):
    def whole_step(training, shape, size):
        if shape.frames > 1 and len(training.model.blocks) > 1:  # a warm-up has one block
            if ranks > 1:
                monkeypatch.setattr(accelerate.Accelerator, "num_processes", ranks)
            raise torch.OutOfMemoryError("of 48 GiB")

    monkeypatch.setattr(RandomTraining, "whole_step", whole_step)
    monkeypatch.setattr(step_memory, "all_ranks_fail_together", contextlib.nullcontext)
    ending = pytest.raises(UserError, match=r"out of memory: 2x4x8=1, eager\. The other")
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        set_arguments(monkeypatch, tmp_path, "--points", "1x4x4=1", "2x4x8=1", "5x4x8=1")
        with contextlib.nullcontext() if ranks == 1 else ending:
            step_memory.main()
    rows = json.loads((tmp_path / "step_memory.json").read_text())["rows"]
    shapes = [(row["shape"], row["oom"]) for row in rows]
    alone = [("1x4x4", False), ("2x4x8", True), ("5x4x8", True)] * 2
    assert shapes == (alone if ranks == 1 else alone[:2])


def test_step_memory_limits_no_memory_that_is_not_there(tmp_path, monkeypatch):
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        set_arguments(monkeypatch, tmp_path, "--points", "1x4x4=1", "--memory_limit_gib", "48")
        with pytest.raises(UserError, match="a GPU with more, but found 0"):
            step_memory.main()


RESULTS = sorted((ROOT / "recipes" / "results").glob("*_compare.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_committed_comparison_trained_the_same_samples_in_every_arm_as_predicted(path):
    result = json.loads(path.read_text())
    predicted = json.loads(path.with_name(path.name.replace("_compare", "_predicted")).read_text())
    assert result["environment"]["gpu"] and result["command"] and result["date"]
    assert len({row["samples"] for row in result["arms"]}) == 1
    assert result["samples"] == predicted["samples"]
    beforehand = {row["arm"]: row for row in predicted["arms"]}
    for row in result["arms"]:
        assert row["predicted"] == beforehand[row["arm"]]["predicted"]
        assert row["samples"] == sum(result["samples"].values())


@pytest.mark.parametrize("kernels, name", [("eager", "h200_fsdp2_steps"), ("patched", "h200_fsdp2_patched_steps")])
def test_a_law_of_the_same_gpus_says_what_two_ranks_took_and_needed(kernels, name):
    measurements, _ = read_measurements(ROOT / "tests" / "data" / f"{name}.jsonl")
    cost, memory = fit_cost_model(measurements).model, fit_memory_model(measurements)
    result = json.loads((ROOT / "recipes" / "results" / "wan21_1.3b_2gpu_compare.json").read_text())
    arms = [arm for arm in result["arms"] if arm["arm"].endswith(kernels)]
    assert arms
    for arm in arms:
        sizes = np.array([size for _, size, _ in arm["micro_batches"]]).reshape(-1, 2)
        tokens = [TokenGeometry().tokens(LatentShape.parse(shape)) for shape, _, _ in arm["micro_batches"]]
        tokens = np.array(tokens).reshape(-1, 2)
        seconds = cost.seconds(sizes, tokens)
        assert seconds.max(1).sum() == pytest.approx(arm["seconds"], rel=0.05)
        # A micro-step of small batches waits for the host, which is not as fast one day as another.
        assert np.median(np.abs(seconds.max(1) / np.diff(np.mean(arm["starts"], axis=0)) - 1)) < 0.05
        busy = seconds.mean(1).sum() / seconds.max(1).sum()
        assert busy == pytest.approx(arm["measured_balance_efficiency"], abs=0.05)
        assert memory.gib(sizes, tokens).max() == pytest.approx(arm["peak_gib"], rel=0.005)
        # docs/results.md: what every arm missed alike is the other GPUs, not something that the law lacks.
        even = (seconds.min(1) > 0.99 * seconds.max(1)) & (seconds.max(1) > 1.15 * cost.floor)
        missed = seconds.max(1)[even].sum() / np.diff(np.mean(arm["starts"], axis=0))[even].sum() - 1
        assert 0.036 <= missed <= 0.0385


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_committed_replay_took_what_was_predicted_to_within_one_percent(ranks):
    results = ROOT / "recipes" / "results"
    replay = json.loads((results / "wan21_1.3b_replay.json").read_text())
    predicted = json.loads((results / f"wan21_1.3b_replay_{ranks}_predicted.json").read_text())
    beforehand = {row["arm"]: row["predicted"] for row in predicted["arms"]}
    rows = [row for row in replay["arms"] if row["ranks"] == ranks]
    assert [row["arm"] for row in rows] == list(beforehand)
    for row in rows:
        assert row["predicted"] == pytest.approx(beforehand[row["arm"]], rel=1e-6)
        if row["predicted"]:
            assert row["predicted"]["epoch_seconds"] == pytest.approx(row["seconds"], rel=0.01)


@pytest.mark.parametrize("kernels", ["patched", "compiled"])
def test_a_law_of_every_third_size_says_what_the_sizes_between_took(kernels):
    replay = json.loads((ROOT / "recipes" / "results" / "wan21_1.3b_replay.json").read_text())
    timed = []
    for size, seconds in replay["timed_seconds"][kernels].items():
        shape, batch_size = size.split("=")
        tokens = TokenGeometry().tokens(LatentShape.parse(shape))
        timed.append(Measurement(shape, tokens, int(batch_size), seconds, 0.0))
    timed.sort(key=lambda m: (m.tokens, m.batch_size))
    assert len(timed) > 20
    smallest = min(timed, key=lambda m: m.tokens * m.batch_size)
    for first in range(3):
        fitted = [timed[0], smallest, *timed[1 + first : -1 : 3], timed[-1]]
        others = [m for m in timed if m not in fitted]
        law = fit_cost_model(fitted).model
        predicted = np.array([float(law.seconds(m.batch_size, m.tokens)) for m in others])
        seconds = np.array([m.seconds for m in others])
        assert np.median(np.abs(predicted / seconds - 1)) < 0.012
        assert predicted.sum() == pytest.approx(seconds.sum(), rel=0.015)
