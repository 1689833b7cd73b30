"""Does a finished run reach the Hub with a card that the Hub takes, and lose nothing where it does not?"""

import pytest
from support.hub_server import OWNER, READ_TOKEN, WRITE_TOKEN, Repository, visited_hub
from support.train_ranks import timeless, train_here

from adaptiveload_hf import BucketConfig, UserError


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with visited_hub(monkeypatch, tmp_path) as hub:
        yield hub


def push(setup, run, *extra, token=WRITE_TOKEN, **changed):
    options = {"max_train_steps": 2, "checkpointing_steps": 1, **changed}
    return train_here(setup, run, "--push_to_hub", "--hub_token", token, *extra, **options)


def test_result_and_card_reach_the_hub_and_neither_checkpoints_nor_local_paths_do(setup, hub, tmp_path, capsys):
    run = tmp_path / "cats"
    push(setup, run, report_to="tensorboard")
    files = hub.files(f"{OWNER}/cats")
    weights = {"transformer/config.json", "transformer/diffusion_pytorch_model.safetensors"}
    assert set(files) == {"README.md", *weights}
    card = files["README.md"].decode()
    assert "library_name: diffusers" in card and "base_model" not in card
    assert f'from_pretrained("{OWNER}/cats", subfolder="transformer"' in card
    assert "| 5x4x8 | 14 |" in card
    assert str(tmp_path) not in card and str(setup.pipeline) not in card
    assert f"{hub.url}/{OWNER}/cats/commit/" in capsys.readouterr().out
    logged = b"".join(path.read_bytes() for path in run.rglob("events.out.tfevents*"))
    assert b"hub_model_id" in logged and WRITE_TOKEN.encode() not in logged


def test_a_pipeline_and_a_bucket_config_of_the_hub_are_trained_with_and_the_card_loads_that_revision(
    setup, hub, tmp_path
):
    pipeline = Repository(branches={"main": 0, "v2": 0})
    files = [path for path in setup.pipeline.rglob("*") if path.is_file()]
    pipeline.add({path.relative_to(setup.pipeline).as_posix(): path.read_bytes() for path in files}, "v2")
    hub.repositories[f"{OWNER}/wan"] = pipeline
    BucketConfig.from_pretrained(setup.config).push_to_hub(f"{OWNER}/buckets", token=WRITE_TOKEN)
    whole = train_here(setup, tmp_path / "here", max_train_steps=2)
    words = ("--revision", "v2", "--validation_prompt", "a cat", "--validation_resolution", "1x16x16")
    words += ("--validation_inference_steps", 1)
    options = {"pretrained_model_name_or_path": f"{OWNER}/wan", "bucket_config": f"{OWNER}/buckets"}
    assert timeless(push(setup, tmp_path / "run", *words, **options)) == timeless(whole)
    card = hub.files(f"{OWNER}/run")["README.md"].decode()
    assert f"base_model: {OWNER}/wan\n" in card
    assert f'from_pretrained("{OWNER}/wan", revision="v2", transformer=transformer' in card
    assert "validation/step-2-0.mp4" in hub.files(f"{OWNER}/run")


def test_a_lora_is_pushed_alone_with_how_to_load_it(setup, hub, tmp_path):
    push(setup, tmp_path / "run", "--rank", 2, "--hub_model_id", f"{OWNER}/lora")
    files = hub.files(f"{OWNER}/lora")
    assert set(files) == {"README.md", "pytorch_lora_weights.safetensors"}
    assert f'pipe.load_lora_weights("{OWNER}/lora")' in files["README.md"].decode()


def test_a_push_that_is_refused_in_the_end_leaves_everything_saved_and_the_command_for_later(setup, hub, tmp_path):
    run = tmp_path / "run"
    hub.fail(r"POST /api/models/.*/commit/.*", 403)
    with pytest.raises(UserError, match=r"hf upload .*run.* --include README.md .*transformer/\*"):
        push(setup, run)
    assert (run / "README.md").exists()
    assert (run / "transformer" / "diffusion_pytorch_model.safetensors").exists()


@pytest.mark.parametrize("name", [(), ("--hub_model_id", f"{OWNER}/cats")])
@pytest.mark.parametrize(
    ("token", "said"),
    [((), r"[Ll]og in|logged in"), (("--hub_token", READ_TOKEN), r"refuses to write to .*status 403")],
)
def test_who_may_not_write_learns_it_before_the_training(setup, hub, tmp_path, name, token, said):
    with pytest.raises(UserError, match=said):
        train_here(setup, tmp_path / "run", "--push_to_hub", *name, *token)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_who_may_not_write_to_a_repository_that_exists_learns_it_before_the_training(setup, hub, tmp_path):
    """huggingface_hub's create_repo(exist_ok=True) is content with the right to read it."""
    hub.repositories[f"{OWNER}/cats"] = Repository()
    words = ("--push_to_hub", "--hub_model_id", f"{OWNER}/cats", "--hub_token", READ_TOKEN)
    with pytest.raises(UserError, match=rf"refuses to write to {OWNER}/cats \(status 403\)"):
        train_here(setup, tmp_path / "run", *words, max_train_steps=1)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_without_a_push_the_card_is_written_all_the_same(setup, tmp_path):
    train_here(setup, tmp_path, max_train_steps=1)
    card = (tmp_path / "README.md").read_text()
    title = f"# {tmp_path.name}\n\nAll weights of WanTransformer3DModel, trained with `adaptiveload_hf`.\n"
    assert title in card and 'WanPipeline.from_pretrained("PIPELINE", transformer=transformer' in card
