"""Does one command go from a model and a dataset to a bucket config, and go on after an interruption?"""

import json
import os
import shutil
import sys
from pathlib import Path

import benchmark_shapes
import pytest
from diffusers import WanTransformer3DModel
from support.accelerators import fresh_accelerate
from support.hub_server import READ_TOKEN, WRITE_TOKEN, visited_hub
from support.launch import ROOT, launch
from support.prepared import save_prepared

from adaptiveload_hf import BucketConfig, LatentShape, Measurement, TokenGeometry, UserError
from adaptiveload_hf.benchmark import append_line, choose_points

RECIPE = ROOT / "recipes" / "benchmark_shapes.py"
COUNTS = {"1x4x4": 9, "2x4x8": 6, "5x4x8": 5}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return save_prepared(tmp_path_factory.mktemp("prepared"), COUNTS)


@pytest.fixture
def one_layer(tiny_pipeline, tmp_path):
    """Configurations alone, of a transformer with one block: every step that is timed costs time here."""
    for part, name in (("transformer", "config.json"), ("scheduler", "scheduler_config.json")):
        (tmp_path / "pipeline" / part).mkdir(parents=True)
        settings = json.loads((tiny_pipeline / part / name).read_text())
        settings |= {"num_layers": 1} if part == "transformer" else {}
        (tmp_path / "pipeline" / part / name).write_text(json.dumps(settings))
    shutil.copy(tiny_pipeline / "model_index.json", tmp_path / "pipeline")
    return tmp_path / "pipeline"


def arguments(pipeline, dataset, output_dir, *extra):
    return [
        *("--pretrained_model_name_or_path", pipeline, "--dataset", dataset, "--output_dir", output_dir),
        *("--gradient_accumulation_steps", 2, "--max_points", 5, *extra),
    ]


@pytest.mark.distributed
def test_one_command_measures_the_sharded_step_fits_plans_simulates_and_writes(one_layer, dataset, tmp_path):
    output = tmp_path / "config"
    # Points enough to climb off the floor, which is high on a machine with other work.
    done = launch(RECIPE, *arguments(one_layer, dataset, output, "--from_scratch", "--max_points", 7), timeout=300)
    assert done.returncode == 0, done.stderr

    config = BucketConfig.from_pretrained(output)
    assert config.geometry.patch_size == (1, 2, 2)
    environment = config.environment
    assert (environment["world_size"], environment["gradient_accumulation_steps"]) == (2, 2)
    assert (environment["strategy"], environment["patched"], environment["dtype"]) == ("fsdp2", True, "float32")
    model = WanTransformer3DModel.from_config(json.loads((one_layer / "transformer" / "config.json").read_text()))
    of_a_rank = 4 * model.num_parameters() / 2 / 2**30
    assert environment["gradient_gib"] == pytest.approx(of_a_rank, rel=0.2)
    assert 4 <= len(config.measurements) <= 7
    for measured in config.measurements:
        assert measured.seconds == max(measured.rank_seconds)
        assert len(measured.rank_seconds) == 2
        assert measured.peak_gib == 0.0
    lines = (output / "measurements.jsonl").read_text().splitlines()
    assert [json.loads(line)["batch_size"] for line in lines] == [m.batch_size for m in config.measurements]
    assert {str(bucket.shape): bucket.count for bucket in config.example_plan.buckets} == COUNTS
    counts = {LatentShape.parse(shape): count for shape, count in COUNTS.items()}
    assert config.plan(counts, world_size=2, gradient_accumulation_steps=2).batch_size_of(LatentShape(5, 4, 8)) >= 1

    assert "(used)" in done.stdout
    for shape in COUNTS:
        assert shape in done.stdout
    assert "equal_token" in done.stdout
    assert "WanTransformerBlock" in done.stderr, "the patch report"
    assert "recipes/train_wan.py" in done.stderr.strip().splitlines()[-1]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with visited_hub(monkeypatch, tmp_path / "hub") as hub:
        yield hub


def test_what_was_measured_before_is_kept_and_pushed_but_never_mixed_with_another_setup(
    tiny_pipeline, dataset, tmp_path, monkeypatch, hub
):
    for point in choose_points([LatentShape.parse(shape) for shape in COUNTS], TokenGeometry(), max_points=6):
        seconds = 0.05 + 5e-3 * point.all_tokens
        measured = Measurement(str(point.shape), point.tokens, point.batch_size, seconds, 0.0, (seconds,))
        append_line(tmp_path / "measurements.jsonl", measured.to_json())
    before = (tmp_path / "measurements.jsonl").read_text()

    def benchmark(*extra):
        words = [*arguments(tiny_pipeline, dataset, tmp_path, "--max_points", 7, *extra)]
        monkeypatch.setattr(sys, "argv", ["", *map(str, words)])
        with fresh_accelerate(ACCELERATE_USE_CPU="true"):
            benchmark_shapes.main()

    benchmark("--push_to_hub", "--hub_model_id", "someone/wan-costs", "--hub_token", WRITE_TOKEN)
    with pytest.raises(UserError, match=r"refuses to write to someone/wan-costs \(status 403\)[^\n]* there\.$"):
        benchmark("--push_to_hub", "--hub_model_id", "someone/wan-costs", "--hub_token", READ_TOKEN)  # before all else
    pushed = hub.files("someone/wan-costs")
    assert pushed["measurements.jsonl"].decode() == before
    assert {"bucket_config.json", "README.md"} <= set(pushed)
    assert (tmp_path / "measurements.jsonl").read_text() == before, "nothing was left to measure"
    assert BucketConfig.from_pretrained(tmp_path).cost_model.seconds(1, 4) == pytest.approx(0.07, rel=0.1)
    spelled = Path(os.path.relpath(tiny_pipeline))
    assert str(spelled) != str(tiny_pipeline)
    benchmark("--pretrained_model_name_or_path", spelled)
    assert (tmp_path / "measurements.jsonl").read_text() == before
    with pytest.raises(UserError, match=r"another set-up:\n  environment.patched: True there, False now"):
        benchmark("--no_patch")
    setup = (tmp_path / "benchmark_setup.json").read_text()
    (tmp_path / "benchmark_setup.json").write_text(setup.replace('"config_hash": "', '"config_hash": "of another '))
    with pytest.raises(UserError, match=r"another set-up:\n  model.config_hash: of another "):
        benchmark()
    (tmp_path / "benchmark_setup.json").write_text('{"model": ')
    with pytest.raises(UserError, match=r"benchmark_setup\.json should say .* but it is damaged"):
        benchmark()


def test_given_points_alone_are_measured(tmp_path, tiny_pipeline, dataset, monkeypatch):
    points = ("1x4x4=1", "1x4x4=8", "2x4x8=1", "5x4x8=1", "5x4x8=3")
    for shape, size in (point.split("=") for point in points[:-1]):
        tokens = TokenGeometry().tokens(LatentShape.parse(shape))
        append_line(
            tmp_path / "measurements.jsonl", Measurement(shape, tokens, int(size), 9.0 * tokens, 0.0, (1.0,)).to_json()
        )
    words = [*arguments(tiny_pipeline, dataset, tmp_path, "--points", *points)]
    monkeypatch.setattr(sys, "argv", ["", *map(str, words)])
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        benchmark_shapes.main()
    measured = BucketConfig.from_pretrained(tmp_path).measurements
    assert tuple(f"{m.shape}={m.batch_size}" for m in measured) == points


def test_too_few_samples_for_an_optimizer_step_are_refused_before_anything_is_timed(
    tmp_path, tiny_pipeline, monkeypatch
):
    few = save_prepared(tmp_path / "few", {"1x4x4": 1})
    monkeypatch.setattr(sys, "argv", ["", *map(str, arguments(tiny_pipeline, few, tmp_path / "config"))])
    with fresh_accelerate(ACCELERATE_USE_CPU="true"), pytest.raises(UserError, match="1 ranks x 2 micro-steps"):
        benchmark_shapes.main()
    assert not (tmp_path / "config" / "measurements.jsonl").exists()
