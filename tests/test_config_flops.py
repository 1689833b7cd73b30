"""A config counted from a transformer's own config: planned, saved, loaded, dealt and shown, and never in seconds."""

import json
import sys

import diffusers
import numpy as np
import pytest
from support.accelerators import fresh_accelerate
from support.bucketed import NumberedRows, collate_numbers

from adaptiveload_hf import BucketConfig, BucketDataLoader, LatentShape, UserError, cli, schedule_epoch
from adaptiveload_hf.buckets.flops import flops_cost
from adaptiveload_hf.buckets.shapes import index_shapes
from adaptiveload_hf.report import write_report

BATCH_SIZES = {"1x60x104": 16, "5x60x104": 4, "13x60x104": 1, "21x60x104": 1}
COUNTS = {LatentShape.parse(shape): n for shape, n in zip(BATCH_SIZES, (600, 180, 80, 60))}
RANKS = {"world_size": 4, "gradient_accumulation_steps": 2}
WAN = diffusers.WanTransformer3DModel(num_layers=1, num_attention_heads=2, attention_head_dim=12, ffn_dim=32)


@pytest.fixture(scope="module")
def config():
    return BucketConfig.from_flops(WAN, batch_sizes=BATCH_SIZES)


@pytest.fixture(scope="module")
def saved(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("counted") / "config"
    config.save_pretrained(folder)
    return folder


def index():
    sizes = [(shape.frames, shape.height, shape.width) for shape, count in COUNTS.items() for _ in range(count)]
    return index_shapes(np.array(sizes))


def test_the_batch_sizes_in_use_are_the_plan(config):
    plan = config.plan(COUNTS, **RANKS)
    assert plan.policy == "fixed"
    assert {str(bucket.shape): bucket.batch_size for bucket in plan.buckets} == BATCH_SIZES
    assert plan.findings[0] == "The cost was counted from the model's config: right in proportion, but no seconds."
    for bucket in plan.buckets:
        assert bucket.seconds == config.cost_model.seconds(bucket.batch_size, bucket.tokens)
    assert config.cost_model == flops_cost(WAN)


def test_one_batch_size_can_be_overridden_and_shapes_may_be_fewer_but_not_more(config):
    some = {shape: count for shape, count in COUNTS.items() if shape.frames > 1}
    plan = config.plan(some, **RANKS, batch_sizes={"5x60x104": 2})
    assert [bucket.batch_size for bucket in plan.buckets] == [2, 1, 1]
    with pytest.raises(UserError, match=r"there is none for 9x60x104\."):
        config.plan({**COUNTS, LatentShape(9, 60, 104): 5}, **RANKS)


def test_dual_stays_within_the_tokens_that_are_known_to_fit(config):
    plan = config.plan(COUNTS, **RANKS, policy="dual")
    assert plan.m_mem_tokens == 32760
    assert "Memory was not measured: micro-batches stay within 32760 tokens, known to fit." in plan.findings
    held = config.plan(COUNTS, **RANKS, policy="dual", samples_per_step=20)
    assert any("samples_per_step is 20" in finding for finding in held.findings)


def test_without_batch_sizes_the_plan_says_that_nothing_limits_memory():
    config = BucketConfig.from_flops(WAN.config)
    plan = config.plan(COUNTS, **RANKS)
    assert plan.policy == "dual" and plan.m_mem_tokens is None
    assert "No memory model or limit: nothing keeps a micro-batch from running out of memory." in plan.findings
    with pytest.raises(UserError, match="there is none for"):
        config.plan(COUNTS, **RANKS, policy="fixed")


def test_limits_in_gib_and_seconds_are_refused(config):
    with pytest.raises(UserError, match="memory_limit_gib = 40 says nothing without measured memory"):
        config.plan(COUNTS, **RANKS, memory_limit_gib=40)
    with pytest.raises(UserError, match="target_seconds is 3, but this cost was counted, not measured"):
        config.plan(COUNTS, **RANKS, policy="dual", target_seconds=3)


def test_dealing_by_counted_cost_balances_the_ranks(config):
    counts = {shape: 2 * count for shape, count in COUNTS.items()}  # auto's window is an eighth of an epoch at most
    none, auto = config.compare(counts, policies=["fixed"], balances=["none", "auto"], world_sizes=[4])
    assert (none.gain, auto.from_batch_sizes) == (1, 1)
    assert auto.simulation.balance_efficiency > 0.9 > none.simulation.balance_efficiency
    assert auto.gain > 1.1


def test_a_saved_config_comes_back_equal(config, saved):
    assert {path.name for path in saved.iterdir()} == {"bucket_config.json", "README.md"}
    loaded = BucketConfig.from_pretrained(saved, strict=True)
    assert loaded.to_json_string() == config.to_json_string()
    assert loaded.plan(COUNTS, **RANKS) == config.plan(COUNTS, **RANKS)
    assert (loaded.power_law, loaded.memory_model, loaded.measurements) == (None, None, [])


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("power_law", {}, "power_law must be null beside a counted cost, but it is {}"),
        ("batch_sizes", [1], r"batch_sizes must be a JSON object, but it is \[1\]"),
        ("batch_sizes", {"1x60x104": 0}, "batch_sizes.1x60x104 must be a whole number of at least 1, .* but it is 0"),
        ("batch_sizes", {"60x104": 2}, "Write a still as '1x60x104'"),
        ("cost_model", {"kind": "flops", "parameters": {"a": 0}}, "cost_model: The flops cost model has the non-neg"),
    ],
)
def test_a_hand_edited_field_that_cannot_be_is_named(saved, tmp_path, field, value, words):
    fields = json.loads((saved / "bucket_config.json").read_text())
    (tmp_path / "bucket_config.json").write_text(json.dumps({**fields, field: value}))
    with pytest.raises(UserError, match=words):
        BucketConfig.from_pretrained(tmp_path)


def test_the_card_says_that_nothing_was_measured(saved):
    card = (saved / "README.md").read_text()
    assert "Nothing was measured." in card and "## Measurements" not in card
    assert "| 5x60x104 | 7800 | 4 |" in card
    assert "| **flops** (used) |" in card and "| not measured | not measured |" in card
    assert "relative cost (teraflop), not seconds" in card


def test_a_loader_deals_by_it(config):
    from accelerate import Accelerator

    with fresh_accelerate():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        dataset = NumberedRows(sum(COUNTS.values()))
        loader = BucketDataLoader(dataset, config, accelerator=accelerator, shapes=index(), collate_fn=collate_numbers)
        seen = [int(number) for batch in loader for number in batch["number"]]
        state = loader.state_dict()
        loader.load_state_dict(state)
    assert sorted(seen) == list(range(sum(COUNTS.values())))
    expected = schedule_epoch(
        index().bucket_of_sample, loader.plan, config.cost_model, world_size=1, gradient_accumulation_steps=2
    )
    assert seen == expected.sample_order.tolist()


def test_a_loader_passes_on_what_the_plan_takes(config):
    from accelerate import Accelerator

    options = {"policy": "dual", "samples_per_step": 20, "batch_sizes": {"1x60x104": 10}}
    with fresh_accelerate():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        loader = BucketDataLoader(
            NumberedRows(sum(COUNTS.values())), config, accelerator=accelerator, shapes=index(), **options
        )
    assert loader.plan == config.plan(COUNTS, world_size=1, gradient_accumulation_steps=2, **options)
    assert loader.plan.batch_size_of("1x60x104") == 10


# Qwen-Image, FLUX.2-klein-4B and Sana 1.6B: what their config.json have and the class's defaults have not.
RELEASED = {
    "QwenImageTransformer2DModel": {"pooled_projection_dim": 768, "num_layers": 60},
    "Flux2Transformer2DModel": {
        **{"num_attention_heads": 24, "num_layers": 5, "num_single_layers": 20, "joint_attention_dim": 7680},
        **{"guidance_embeds": False},
    },
    "SanaTransformer2DModel": {"num_layers": 20},
}


@pytest.mark.parametrize("model_class", RELEASED)
def test_a_released_model_is_counted_planned_and_dealt_without_its_weights(model_class, tmp_path, monkeypatch, capsys):
    from accelerate import Accelerator

    sizes = {"1x32x32": 8, "1x64x64": 4, "1x128x128": 1}
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": model_class, **RELEASED[model_class]}))
    batch_sizes = [word for shape, size in sizes.items() for word in ("--batch-size", f"{shape}={size}")]
    (tmp_path / "shapes.json").write_text(json.dumps(dict.fromkeys(sizes, 40)))
    simulate = ["--shapes", str(tmp_path / "shapes.json"), "--world-size", "4", "--gradient-accumulation-steps", "2"]
    for line in (
        ["count", str(tmp_path), "--output", str(tmp_path / "counted"), *batch_sizes],
        ["simulate", str(tmp_path / "counted"), *simulate],
    ):
        monkeypatch.setattr(sys, "argv", ["adaptiveload", *line])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
    assert (
        capsys.readouterr().err.splitlines()[-1].startswith("next: in your own loop (no recipe trains this model): B")
    )
    config = BucketConfig.from_pretrained(tmp_path / "counted")
    numbers = [config.cost_model.seconds(1, config.geometry.tokens(LatentShape.parse(shape))) for shape in sizes]
    assert numbers[0] < numbers[1] / 2 < numbers[2] / 4
    shapes = index_shapes(np.array([(1, edge, edge) for edge in (32, 64, 128) for _ in range(40)]))
    with fresh_accelerate():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        loader = BucketDataLoader(
            NumberedRows(120), config, accelerator=accelerator, shapes=shapes, collate_fn=collate_numbers
        )
        seen = [int(number) for batch in loader for number in batch["number"]]
    assert sorted(seen) == list(range(120))


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_no_command_calls_it_seconds(command, saved, tmp_path, monkeypatch, capsys):
    (tmp_path / "shapes.json").write_text(json.dumps({str(shape): count for shape, count in COUNTS.items()}))
    line = ["adaptiveload", command, str(saved), "--shapes", str(tmp_path / "shapes.json"), "--world-size", "4"]
    for extra in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", [*line, "--gradient-accumulation-steps", "2", *extra])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert not ended.value.code
        assert "second" not in (out + err).replace("but no seconds", "") and "/s " not in out
        assert "relative cost" in out or "relative_cost" in out
    assert "no seconds" in err if command == "plan" else json.loads(out)[0]["gain"] == 1


def test_the_report_calls_it_relative_cost(config, tmp_path):
    files, _ = write_report(tmp_path / "report.html", config, COUNTS, **RANKS)
    page = files[0].read_text()
    assert [path.stem for path in files] == ["report", "ranks", "buckets"]
    assert "counted from its config, not measured" in page and "<th>relative cost</th>" in page
    assert "After: the same batch sizes, balanced by cost" in page and "These batch sizes are in use already." in page
    assert "<th>epoch relative cost</th>" in page and "samples/s" not in page and "seconds</th>" not in page
