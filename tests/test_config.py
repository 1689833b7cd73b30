"""Is a bucket config saved and loaded unchanged, and is whatever cannot be used named by file and field?"""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
from support.measured import COST, ENVIRONMENT, MEMORY, MODEL, fit_config, make_config, measure

import adaptiveload_hf.environment
from adaptiveload_hf import BucketConfig, LatentShape, TokenGeometry, UserError
from adaptiveload_hf.config_file import plain
from adaptiveload_hf.environment import MEMORY_RESERVE

COUNTS = {LatentShape(1, 60, 104): 300, LatentShape(5, 60, 104): 80, LatentShape(21, 60, 104): 40}
RANKS = {"world_size": 8, "gradient_accumulation_steps": 2}


@pytest.fixture(scope="module")
def config():
    return make_config()


@pytest.fixture(scope="module")
def saved(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    config.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy that the test may edit."""
    return shutil.copytree(saved, tmp_path / "config")


def edit(folder, change):
    path = folder / "bucket_config.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def test_the_fit_finds_the_law_that_the_steps_follow(config):
    assert config.cost_model.kind == "roofline"
    for m in config.measurements:
        assert config.cost_model.seconds(m.batch_size, m.tokens) == pytest.approx(m.seconds, rel=1e-3)
        assert config.memory_model.gib(m.batch_size, m.tokens) == pytest.approx(m.peak_gib, rel=1e-3)


def test_a_loaded_config_equals_the_saved_one(config, folder):
    config.example_plan = config.plan(COUNTS, **RANKS)
    config.save_pretrained(folder)
    loaded = BucketConfig.from_pretrained(folder)
    assert loaded.to_json_string() == config.to_json_string()
    assert loaded.measurements == config.measurements
    assert (loaded.cost_model, loaded.power_law) == (config.cost_model, config.power_law)
    assert (loaded.memory_model, loaded.geometry) == (config.memory_model, config.geometry)
    assert loaded.example_plan == config.example_plan


def test_a_plan_says_which_dealing_it_is_for_and_one_from_before_was_for_auto(config, folder):
    config.example_plan = config.plan(COUNTS, **RANKS, balance="none")
    config.save_pretrained(folder)
    assert BucketConfig.from_pretrained(folder).example_plan.balance == "none"
    assert "Made for balance `none`." in (folder / "README.md").read_text()
    edit(folder, lambda fields: fields["example_plan"].pop("balance"))
    assert BucketConfig.from_pretrained(folder).example_plan.balance == "auto"
    edit(folder, lambda fields: fields["example_plan"].update(balance="wide"))
    with pytest.raises(UserError, match=r"bucket_config.json: example_plan: balance is none, step, .*found 'wide'"):
        BucketConfig.from_pretrained(folder)


def test_an_example_plan_of_a_later_version_may_say_more(config, folder):
    def say_more(fields):
        fields["example_plan"]["mood"] = fields["example_plan"]["buckets"][0]["colour"] = "good"

    config.example_plan = config.plan(COUNTS, **RANKS)
    config.save_pretrained(folder)
    edit(folder, say_more)
    assert BucketConfig.from_pretrained(folder).example_plan == config.example_plan


def test_saving_twice_writes_the_same_bytes(config, folder):
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    BucketConfig.from_pretrained(folder).save_pretrained(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == written


def test_numpy_numbers_tuples_and_shapes_become_plain_json():
    value = {
        (21, 60, 104): np.int64(3),
        LatentShape(1, 2, 4): np.float32(0.5),
        "rows": np.arange(2),
        "flag": np.bool_(True),
        "shape": LatentShape(5, 6, 8),
    }
    expected = {"21x60x104": 3, "1x2x4": 0.5, "rows": [0, 1], "flag": True, "shape": "5x6x8"}
    assert json.loads(json.dumps(plain(value, "model"))) == expected


@pytest.mark.parametrize("number", [math.inf, math.nan, np.float64("inf")])
def test_a_number_that_json_cannot_hold_is_named(number):
    with pytest.raises(UserError, match=r"environment\.versions\.torch must be a finite number"):
        fit_config(measure(), environment={"versions": {"torch": number}})


def test_a_value_of_another_type_is_named():
    with pytest.raises(UserError, match=r"environment\.gpu must be a JSON value, but it is a object"):
        fit_config(measure(), environment={"gpu": object()})


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("format_version", 3, "has format_version 3, but this adaptiveload_hf reads up to 2. Install"),
        ("format_version", None, "has no format_version"),
        ("format_version", "2", "format_version must be a whole number up to 2, but it is '2'"),
        ("origin", "counted", "origin must be 'benchmark' or 'training_log', but it is 'counted'"),
        ("model", [], r"model must be a JSON object, but it is \[\]"),
        (
            "model.patch_size",
            [1, 2],
            r"model.patch_size must be three whole numbers .*, but it is \[1, 2\]",
        ),
        ("model.patch_size", [1, 2, 0], "model.patch_size must be three whole"),
        ("model.patch_size", [1, 1, 1], "was measured with 1560 tokens, but patch size"),
        ("model.text_tokens", -1, "model.text_tokens must be a whole number of at least 0, .* but it is -1"),
        ("cost_model.kind", "quadratic", "cost_model: Expected a cost model of kind"),
        ("cost_model.parameters", None, "cost_model.parameters must be a JSON object"),
        ("cost_model.parameters.c1", -1, "cost_model.parameters.c1 must be a number from 0 to 1e.12, but it is -1"),
        ("cost_model.parameters.c1", "fast", "cost_model.parameters.c1 must be a number from 0"),
        ("cost_model.errors.median", "low", "cost_model.errors.median must be a number from 0"),
        ("power_law.kind", "roofline", "power_law: The roofline cost model"),
        ("memory_model.base_gib", True, "memory_model.base_gib must be a number from 0 to .*, but it is True"),
        ("memory_model.slope", 1, "memory_model must have the keys base_gib, gib_per_token and may have floor_gib"),
        ("memory_model.known_tokens", 0.5, "memory_model.known_tokens must be a whole number of at least 1"),
        ("example_plan", "mine", "example_plan must be a JSON object"),
        ("example_plan", {"policy": "dual"}, "example_plan lacks target_seconds, m_mem_tokens, buckets, findings"),
        ("environment.gpu_memory_gib", "80 GB", "environment.gpu_memory_gib must be a number from 0.1"),
        ("environment.world_size", 2.5, "environment.world_size must be a whole number of at least 1"),
        ("environment.gradient_accumulation_steps", "2", "environment.gradient_accumulation_steps must be a whole"),
        ("memmory_model", {}, "has unknown keys: memmory_model"),
    ],
)
def test_a_hand_edited_field_that_cannot_be_is_named_with_its_file(folder, field, value, words):
    def change(fields):
        *path, last = field.split(".")
        for key in path:
            fields = fields[key]
        fields[last] = value

    edit(folder, change)
    with pytest.raises(UserError, match=words) as error:
        BucketConfig.from_pretrained(folder)
    assert "bucket_config.json" in str(error.value)


def test_a_missing_field_is_named(folder):
    edit(folder, lambda fields: fields.pop("power_law"))
    with pytest.raises(UserError, match=r"bucket_config\.json lacks power_law"):
        BucketConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"format_version": 1,\n "model": {', r"bucket_config\.json is not whole JSON: .* in line 2"),
        (b"[1]", "must hold a JSON object, but it holds a list"),
        (b'{"format_version": NaN}', "NaN stands where a finite number must be"),
        (b'{"format_version": Infinity}', "Infinity stands where"),
        (b'{"gpu": "\xff"}', "is not UTF-8 text"),
        (b'{"format_version": 2, "model": {"patch_size": 1, "patch_size": 2}}', "has patch_size twice in one object"),
    ],
)
def test_a_file_that_is_no_json_is_named(folder, content, words):
    (folder / "bucket_config.json").write_bytes(content)
    with pytest.raises(UserError, match=words):
        BucketConfig.from_pretrained(folder)


def test_a_bad_line_of_measurements_is_named_and_the_rest_kept(folder):
    path = folder / "measurements.jsonl"
    path.write_text(path.read_text()[:-20])
    with pytest.warns(UserWarning, match=r"measurements\.jsonl, line 10: not a measurement"):
        loaded = BucketConfig.from_pretrained(folder)
    assert loaded.measurements == measure()[:-1]


def test_no_usable_measurement_is_an_error(folder):
    (folder / "measurements.jsonl").write_text("{\n")
    with pytest.raises(UserError, match=r"measurements\.jsonl holds no usable measurement \(1 unreadable"):
        BucketConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "remedy"), [("bucket_config.json", r".*that recipes/benchmark_shapes\.py, "), ("measurements.jsonl", "")]
)
def test_a_missing_file_is_named(folder, name, remedy):
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"holds no {name}{remedy}"):
        BucketConfig.from_pretrained(folder)


@pytest.mark.parametrize("name", ["config", "no/such/folder", "/no/such/folder", "./config"])
def test_what_is_neither_folder_nor_hub_id_is_an_error(name):
    with pytest.raises(UserError, match=f"There is no folder {name}, and a Hub id would read user/repo"):
        BucketConfig.from_pretrained(name)


def test_loading_runs_no_code_of_the_folder(folder):
    (folder / "config.py").write_text("raise SystemExit")
    edit(folder, lambda fields: fields.update(auto_map={"AutoModel": "config.BucketConfig"}))
    with pytest.raises(UserError, match="unknown keys: auto_map"):
        BucketConfig.from_pretrained(folder)


def test_saving_over_a_file_is_an_error(config, tmp_path):
    (tmp_path / "config").write_text("")
    with pytest.raises(UserError, match="is a file"):
        config.save_pretrained(tmp_path / "config")


def test_push_options_without_a_push_are_an_error(config, tmp_path):
    with pytest.raises(UserError, match=r"\['private'\] are options of a push"):
        config.save_pretrained(tmp_path, private=True)


def test_tokens_of_another_geometry_are_an_error():
    with pytest.raises(UserError, match=r"1x60x104 was measured with 1560 tokens, but patch size .* make 1893"):
        BucketConfig.from_measurements(
            measure(), model=MODEL, environment={}, geometry=TokenGeometry((1, 2, 2), text_tokens=333)
        )


@pytest.mark.parametrize("path", ["/data/models/wan", "models/wan"])
def test_no_local_path_of_the_model_reaches_the_files(path, tmp_path, monkeypatch):
    monkeypatch.setattr("adaptiveload_hf.card.can_draw", lambda: False)
    (tmp_path / "models" / "wan").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    fit_config(measure(), model={**MODEL, "base_model": path}).save_pretrained("config")
    for file in (tmp_path / "config").iterdir():
        assert path.encode() not in file.read_bytes()
        assert b"base_model" not in file.read_bytes()


def test_the_card_has_tags_tables_picture_and_use(config, folder):
    card = (folder / "README.md").read_text()
    assert "library_name: adaptiveload_hf" in card
    assert "- adaptiveload\n- bucket-config\n- video-diffusion" in card
    assert "base_model: Wan-AI/Wan2.1-T2V-1.3B-Diffusers" in card
    assert "| gpu | NVIDIA H200 |" in card
    assert "| **roofline** (used) |" in card
    assert "| 21x60x104 | 32760 | 2 |" in card
    assert "![measured seconds, fitted laws and their errors](fit.png)" in card
    assert "BucketConfig.from_pretrained(" in card


def test_words_of_others_cannot_break_the_card(tmp_path, monkeypatch):
    monkeypatch.setattr("adaptiveload_hf.card.can_draw", lambda: False)
    make_config(environment={"gpu": "a | b\n# <script>", "node": "half \ud800"}).save_pretrained(tmp_path)
    assert "| gpu | a \\| b # &lt;script> |" in (tmp_path / "README.md").read_text()
    assert "| node | half \\ud800 |" in (tmp_path / "README.md").read_text()


def test_the_card_goes_without_a_picture_where_matplotlib_is_missing(config, tmp_path, monkeypatch):
    monkeypatch.setattr("adaptiveload_hf.card.can_draw", lambda: False)
    config.save_pretrained(tmp_path)
    assert "fit.png" not in (tmp_path / "README.md").read_text()
    assert not (tmp_path / "fit.png").exists()


def test_only_what_differs_in_environment_and_model_is_listed(config):
    here = {**ENVIRONMENT, "gpu": "NVIDIA A100", "gpu_memory_gib": 140.0, "world_size": 64, "unknown": 1}
    here["versions"] = {"torch": "2.13.0", "diffusers": "0.42.1"}
    assert config.check_environment(here, {"config_hash": "ffff", "patch_size": (1, 2, 2)}) == [
        "gpu: measured with NVIDIA H200, here NVIDIA A100",
        "versions.torch: measured with 2.11.0, here 2.13.0",
        "model config_hash: measured with 0123456789abcdef, here ffff",
    ]


def test_strict_refuses_another_environment_and_takes_this_one(folder, tmp_path):
    with pytest.raises(UserError, match=r"another environment:\n  gpu: measured with NVIDIA H200, here None"):
        BucketConfig.from_pretrained(folder, strict=True)
    here = adaptiveload_hf.environment.current_environment()
    make_config(environment=here).save_pretrained(tmp_path)
    BucketConfig.from_pretrained(tmp_path, strict=True)


def test_strict_refuses_another_strategy_checkpointing_or_model_and_lists_them_all(folder):
    here = {**ENVIRONMENT, "strategy": "ddp", "world_size": 2, "activation_checkpointing": False}
    edit(folder, lambda fields: fields["environment"].update(activation_checkpointing=True))
    with pytest.raises(UserError) as refused:
        BucketConfig.from_pretrained(folder, strict=True, environment=here, model={"config_hash": "ffff"})
    assert [line.strip() for line in str(refused.value).splitlines()[1:-1]] == [
        "activation_checkpointing: measured with True, here False",
        "strategy: measured with fsdp2, here ddp",
        "model config_hash: measured with 0123456789abcdef, here ffff",
    ]


def test_a_config_of_version_1_comes_back_as_one_of_version_2(config, folder):
    def make_old(fields):
        fields["format_version"] = 1
        del fields["origin"], fields["batch_sizes"]

    edit(folder, make_old)
    assert BucketConfig.from_pretrained(folder).to_json_string() == make_config().to_json_string()


def test_the_plan_keeps_a_reserve_of_the_measured_memory_and_says_so(config):
    plan = config.plan(COUNTS, **RANKS)
    limit = (1 - MEMORY_RESERVE) * ENVIRONMENT["gpu_memory_gib"]
    assert plan.findings[0] == f"Memory limit {limit:.1f} GiB: 90% of a GPU with 139.8 GiB."
    assert plan.m_mem_tokens == pytest.approx(MEMORY.max_tokens(limit, 16), rel=1e-3)


def test_the_gpu_here_sets_the_memory_limit_and_another_one_is_said(config, monkeypatch):
    here = {"gpu": "NVIDIA A100", "gpu_memory_gib": 40.0}
    monkeypatch.setattr(adaptiveload_hf.environment, "current_environment", lambda: here)
    findings = config.plan(COUNTS, **RANKS).findings
    assert findings[0] == (
        "Memory limit 36.0 GiB: 90% of a GPU with 40.0 GiB, the one here; the measured one had 139.8 GiB."
    )
    assert findings[1].startswith("Measured on NVIDIA H200, but here is NVIDIA A100: seconds will differ.")
    here["gpu_memory_gib"] = 180.0
    assert config.plan(COUNTS, **RANKS).m_mem_tokens == pytest.approx(MEMORY.max_tokens(162, 16), rel=1e-3)


def test_a_config_of_before_there_was_a_floor_of_memory_loads_as_its_line(folder):
    edit(folder, lambda fields: fields.update(memory_model={"base_gib": 3.0, "gib_per_token": 1e-4}))
    assert BucketConfig.from_pretrained(folder).memory_model == MEMORY


def test_a_plan_says_that_it_does_not_know_how_memory_grows():
    config = make_config()
    config.memory_model = replace(MEMORY, known_tokens=65_520)
    findings = config.plan(COUNTS, **RANKS, memory_limit_gib=20).findings
    assert any(finding.startswith("How memory grows beyond B*S = 65520 was not measured;") for finding in findings)


def test_fewer_ranks_hold_more_of_a_sharded_model_each_and_the_plan_leaves_room_for_it(config):
    plan = config.plan(COUNTS, world_size=2, memory_limit_gib=20)
    assert plan.m_mem_tokens == pytest.approx((20 - 4 * MEMORY.base_gib) / MEMORY.gib_per_token, rel=1e-3)
    assert any(finding.startswith("FSDP2 shards over 2 ranks instead of 8: ") for finding in plan.findings)
    for other, world_size in (({**ENVIRONMENT, "strategy": "ddp"}, 2), (ENVIRONMENT, 64)):
        plan = make_config(environment=other).plan(COUNTS, world_size=world_size, memory_limit_gib=20)
        assert plan.m_mem_tokens == pytest.approx(MEMORY.max_tokens(20, 16), rel=1e-3)


def test_a_given_memory_limit_counts(config):
    plan = config.plan(COUNTS, **RANKS, memory_limit_gib=20)
    assert plan.m_mem_tokens == pytest.approx(MEMORY.max_tokens(20, 16), rel=1e-3)
    assert max(bucket.gib for bucket in plan.buckets) <= 20


def test_without_measured_memory_the_largest_measured_micro_batch_is_the_limit_and_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("adaptiveload_hf.card.can_draw", lambda: False)
    fit_config(measure(memory=False)).save_pretrained(tmp_path)
    config = BucketConfig.from_pretrained(tmp_path)
    assert config.memory_model is None
    plan = config.plan(COUNTS, **RANKS)
    assert plan.m_mem_tokens == max(m.batch_size * m.tokens for m in config.measurements)
    assert max(bucket.batch_size * bucket.tokens for bucket in plan.buckets) <= plan.m_mem_tokens
    assert plan.findings[0].startswith("Memory was not measured")


def test_measured_memory_of_a_gpu_of_unknown_size_is_said_to_be_that_and_how_to_tell_it():
    config = make_config(environment={})
    plan, largest = config.plan(COUNTS, **RANKS), max(m.batch_size * m.tokens for m in config.measurements)
    assert plan.buckets[0].gib is not None and plan.m_mem_tokens == largest
    assert plan.findings[0] == (
        "Memory was measured, but the GPU's size is not known (give a memory limit): micro-batches stay within "
        f"{largest} tokens, known to fit."
    )
    assert "not known" not in " ".join(config.plan(COUNTS, **RANKS, memory_limit_gib=20).findings)


def test_another_world_size_is_stated_as_an_assumption(config):
    findings = config.plan(COUNTS, world_size=4).findings
    assert [finding for finding in findings if finding.startswith("Measured on 8 ranks, planned for 4")]


def test_a_shape_outside_the_measured_range_is_refused_unless_allowed(config):
    counts = {**COUNTS, LatentShape(41, 60, 104): 50}
    with pytest.raises(UserError, match="41x60x104"):
        config.plan(counts, **RANKS)
    assert LatentShape(41, 60, 104) in config.plan(counts, **RANKS, allow_extrapolation=True).shapes


def test_the_planned_seconds_are_those_of_the_law(config):
    for bucket in config.plan(COUNTS, **RANKS).buckets:
        assert bucket.seconds == pytest.approx(COST.seconds(bucket.batch_size, bucket.tokens), rel=1e-3)
