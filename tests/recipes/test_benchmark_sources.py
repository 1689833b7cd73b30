"""Is the benchmark that a training run starts with kept, and does it need neither pipeline nor dataset of its own?"""

import json
import re
import sys
from types import SimpleNamespace

import benchmark_shapes
import pytest
from support.accelerators import fresh_accelerate
from support.prepared import save_prepared
from support.train_ranks import COUNTS, timeless, train_here

from adaptiveload_hf import BucketConfig, UserError


@pytest.fixture(scope="module")
def setup(small_pipeline, tmp_path_factory):
    dataset = save_prepared(tmp_path_factory.mktemp("auto") / "prepared", COUNTS)
    return SimpleNamespace(pipeline=small_pipeline, dataset=dataset, config="auto")


def benchmark(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["benchmark_shapes.py", *map(str, words)])
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        benchmark_shapes.main()


def test_a_run_that_measures_first_and_tries_its_buckets_is_the_one_with_the_finished_folder(
    setup, tmp_path, monkeypatch, capsys
):
    run = tmp_path / "auto"
    begun = train_here(setup, run, preflight=True, max_train_steps=4)
    said = capsys.readouterr().err
    assert f"preflight: {len(COUNTS)} buckets, the worst" in said
    assert "preflight: a checkpoint was saved and loaded" in said
    config = BucketConfig.from_pretrained(run / "bucket_config")
    assert 4 <= len(config.measurements) <= 12
    assert config.environment["gradient_accumulation_steps"] == 2
    assert sorted(path.name for path in run.glob("*checkpoint*")) == ["checkpoint-4"]

    given = train_here(setup, tmp_path / "given", bucket_config=run / "bucket_config", max_train_steps=4)
    assert timeless(begun) == timeless(given)

    monkeypatch.setattr(benchmark_shapes, "benchmark", None)  # would fail if it measured again
    resume = ("--resume_from_checkpoint", "latest")
    assert len(train_here(setup, run, *resume, preflight=True, max_train_steps=6)) == 6
    assert "preflight: passed before, as" in capsys.readouterr().err
    train_here(setup, run, *resume, "--max_grad_norm", 2, preflight=True, max_train_steps=7)
    assert "buckets, the worst" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--balance stripes", "stripes"),
        ("--batch_sizes 1x4x4", "but found '1x4x4'"),
        ("--batch_sizes 9x9x9=2", "--batch_sizes (of the bucket config or given by hand) hold a whole number from 1"),
        ("--repeats gone*=2", "no file of the dataset fits 'gone*'"),
        ("--repeats *=0", "the dataset has 0 samples"),
        ("--memory_limit_gib 20", "--memory_limit_gib = 20 says nothing without measured memory"),  # a CPU's is not
    ],
)
def test_a_plan_that_cannot_be_made_is_refused_before_it_is_measured_for(setup, tmp_path, words, said):
    with pytest.raises(UserError, match=re.escape(said)):
        train_here(setup, tmp_path, *words.split(), max_train_steps=1)
    assert not (tmp_path / "bucket_config").exists()


def test_what_is_measured_for_is_the_epoch_with_its_repeats(setup, tmp_path):
    repeats = ("--repeats", "*=2", *(f"{number}.mp4=0" for number in range(COUNTS["1x4x4"])))
    train_here(setup, tmp_path, *repeats, max_train_steps=1)
    plan = BucketConfig.from_pretrained(tmp_path / "bucket_config").example_plan
    trained = {shape: 2 * count for shape, count in COUNTS.items() if shape != "1x4x4"}
    assert {str(bucket.shape): bucket.count for bucket in plan.buckets} == trained


def test_a_transformer_config_and_a_file_of_shapes_are_enough(setup, tmp_path, monkeypatch, capsys):
    (tmp_path / "shapes.json").write_text(json.dumps({"1x4x4": 40, "5x4x8": 30}))
    words = ["--config", setup.pipeline / "transformer", "--shapes", tmp_path / "shapes.json", "--max_points", 6]
    benchmark(monkeypatch, *words, "--output_dir", tmp_path / "config", "--rank", 2)
    said = capsys.readouterr()
    config = BucketConfig.from_pretrained(tmp_path / "config")
    assert len(config.measurements) <= 6
    assert config.environment["lora"] is True
    assert "base_model" not in config.model
    assert {str(bucket.shape): bucket.count for bucket in config.example_plan.buckets} == {"1x4x4": 40, "5x4x8": 30}
    assert "the paper's law: a = " in said.out and "p = " in said.out
    assert "equal_token" in said.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "nowhere.json"], "--config takes the config.json of a diffusers transformer"),
        (["--pretrained_model_name_or_path", "nowhere"], "expected a pipeline"),
    ],
)
def test_a_model_that_is_none_is_named(words, message, tmp_path, monkeypatch):
    (tmp_path / "shapes.json").write_text('{"1x4x4": 40}')
    with pytest.raises(UserError, match=message):
        benchmark(monkeypatch, *words, "--shapes", tmp_path / "shapes.json", "--output_dir", tmp_path / "config")


def test_a_pipeline_of_another_transformer_is_refused_with_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "model_index.json").write_text(json.dumps({"transformer": ["diffusers", "FluxTransformer2DModel"]}))
    (tmp_path / "shapes.json").write_text('{"1x4x4": 40}')
    with pytest.raises(UserError, match=r"has the transformer FluxTransformer2DModel, but .* Time your own loop"):
        benchmark(
            monkeypatch,
            *("--pretrained_model_name_or_path", tmp_path, "--shapes", tmp_path / "shapes.json"),
            *("--output_dir", tmp_path / "config"),
        )


def test_model_and_data_come_from_one_place_each():
    for words in (["--config", "C", "--pretrained_model_name_or_path", "P", "--dataset", "D"], ["--config", "C"]):
        with pytest.raises(SystemExit):
            benchmark_shapes.parse_args([*words, "--output_dir", "O"])
