"""Does a plan hold for this rank's GPU and for as many shards as there are, and is another geometry refused?"""

from types import SimpleNamespace

import pytest
import torch
from support.measured import ENVIRONMENT, MEMORY, fit_config, make_config, measure

from adaptiveload_hf import BucketConfig, LatentShape, TokenGeometry, UserError
from adaptiveload_hf.environment import current_environment, read_setup, refuse_other_geometry, save_setup

COUNTS = {LatentShape(1, 60, 104): 300, LatentShape(21, 60, 104): 40}


@pytest.mark.parametrize(("rank", "gpu", "limit"), [(0, "A", 72.0), (1, "B", 36.0)])
def test_a_rank_plans_for_the_memory_of_its_own_gpu(monkeypatch, rank, gpu, limit):
    sizes = [SimpleNamespace(name="A", total_memory=80 << 30), SimpleNamespace(name="B", total_memory=40 << 30)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: rank)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sizes[device])
    plan = make_config().plan(COUNTS, world_size=8)
    assert current_environment()["gpu"] == gpu
    assert plan.findings[0].startswith(f"Memory limit {limit:.1f} GiB: ")
    assert plan.m_mem_tokens == pytest.approx(MEMORY.max_tokens(limit, 16), rel=1e-3)


@pytest.mark.parametrize(("ranks", "more"), [(16, 1), (8, 1), (4, 2), (2, 4)])
def test_hsdp_on_fewer_ranks_than_shards_holds_more_of_the_model_each(ranks, more):
    environment = {**ENVIRONMENT, "world_size": 16, "strategy": "hsdp", "dp_shard_size": 8}
    plan = make_config(environment=environment).plan(COUNTS, world_size=ranks, memory_limit_gib=20)
    assert plan.m_mem_tokens == pytest.approx((20 - more * MEMORY.base_gib) / MEMORY.gib_per_token, rel=1e-3)
    said = [finding for finding in plan.findings if "what a rank holds" in finding]
    assert [finding[:40] for finding in said] == [f"HSDP shards over {ranks} ranks instead of 8: w"] * (more > 1)


def test_hsdp_of_unknown_shards_says_that_a_rank_may_hold_more():
    config = make_config(environment={**ENVIRONMENT, "world_size": 16, "strategy": "hsdp"})
    said = "Measured under HSDP on 16 ranks, over how many of them the model was sharded is not known"
    for ranks, times in ((4, 1), (16, 0), (32, 0)):
        findings = config.plan(COUNTS, world_size=ranks, memory_limit_gib=20).findings
        assert sum(finding.startswith(said) for finding in findings) == times


def test_other_shards_of_hsdp_are_a_difference():
    config = make_config(environment={**ENVIRONMENT, "strategy": "hsdp", "dp_shard_size": 8})
    assert config.check_environment({"dp_shard_size": 4}) == ["dp_shard_size: measured with 8, here 4"]
    with pytest.raises(UserError, match=r"environment\.dp_shard_size must be a whole number of at least 1"):
        make_config(environment={"dp_shard_size": 0})


def test_measurements_without_words_about_them_are_of_this_machine():
    config = BucketConfig.from_measurements(measure(), geometry=TokenGeometry())
    assert config.environment == current_environment()
    assert config.model == {"patch_size": [1, 2, 2], "text_tokens": 0}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"text_tokens": 333}, r"\(model text_tokens: measured with 0, here 333\)"),
        ({"patch_size": [1, 1, 1]}, r"\(model patch_size: measured with \[1, 2, 2\], here \[1, 1, 1\]\)"),
        ({"vae_scale": [4, 16]}, r"\(model vae_scale: measured with \[4, 8\], here \[4, 16\]\)"),
    ],
)
def test_a_model_of_another_geometry_is_refused_with_what_differs(facts, words):
    config = fit_config(measure(), model={"class": "WanTransformer3DModel", "vae_scale": (4, 8)})
    same = {"class": "Other", "config_hash": "f", "patch_size": [1, 2, 2], "text_tokens": 0, "vae_scale": [4, 8]}
    refuse_other_geometry(config.model, same)
    refuse_other_geometry({key: same[key] for key in ("patch_size", "text_tokens")}, same)
    with pytest.raises(UserError, match=f"of another geometry {words}, .*Measure this model, count it"):
        refuse_other_geometry(config.model, {**same, **facts})


@pytest.mark.parametrize("scale", [[4], [4, 0], "4x8", 8])
def test_a_scale_of_the_vae_that_cannot_be_is_named(scale):
    with pytest.raises(UserError, match=r"model\.vae_scale must be two whole numbers such as \[4, 8\], but it is"):
        fit_config(measure(), model={"vae_scale": scale})


def test_the_set_up_of_a_run_is_read_as_it_was_saved_and_a_damaged_one_is_named(tmp_path):
    assert read_setup(tmp_path) is None
    save_setup(tmp_path, {"text_tokens": 333}, {"gpu": None})
    assert read_setup(tmp_path) == {"model": {"text_tokens": 333}, "environment": {"gpu": None}}
    for text in ('{"model": {', '{"model": {}}', "[1]", '{"model": 1, "environment": {}}'):
        (tmp_path / "run_setup.json").write_text(text)
        with pytest.raises(UserError, match=r"run_setup\.json should say what the log beside it is of, but it is dam"):
            read_setup(tmp_path)
