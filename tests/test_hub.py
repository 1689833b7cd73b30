"""Do configs and models reach the Hub and come back over real HTTP, and is every failure said plainly?"""

import contextlib
import io
import json
import shlex

import pytest
import torch.multiprocessing
from support.hub_server import READ_TOKEN, WRITE_TOKEN, LocalHub, Repository, local_hub, sha256, visit, visited_hub
from support.measured import make_config
from support.worlds import on_ranks

from adaptiveload_hf import BucketConfig, UserError, cli
from adaptiveload_hf.distributed import all_ranks_fail_together, make_accelerator
from adaptiveload_hf.hub import is_hub_id, push_folder

WAN = {"_class_name": "WanTransformer3DModel", "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12}
WAN |= {"in_channels": 16, "ffn_dim": 32, "text_dim": 4096, "freq_dim": 256, "patch_size": [1, 2, 2]}
COMMIT, CREATE = r"POST /api/models/.*/commit/.*", r"POST /api/repos/create"
STAGES = [CREATE, r"POST /api/validate-yaml", r"POST /api/models/.*/preupload/.*", COMMIT]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setattr("adaptiveload_hf.card.can_draw", lambda: False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with visited_hub(monkeypatch, tmp_path) as hub:
        yield hub


@pytest.fixture(scope="module")
def config():
    return make_config()


@pytest.fixture
def model(tmp_path):
    """A folder as training leaves it: a transformer, its card, and a checkpoint that nobody should see."""
    for name, size in (
        ("transformer/a.safetensors", 2000),
        ("transformer/b.safetensors", 3000),
        ("checkpoint-4/x", 9),
    ):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_bytes(bytes(size))
    (tmp_path / "run" / "README.md").write_text("---\nlibrary_name: diffusers\n---\n# model\n")
    return tmp_path / "run"


MODEL_FILES = ["README.md", "transformer/*"]


def push_model(folder, **options):
    return push_folder(folder, MODEL_FILES, "someone/model", token=WRITE_TOKEN, **options)


def same(one, other):
    return one.to_json_string() == other.to_json_string() and one.measurements == other.measurements


def load(**options):
    return BucketConfig.from_pretrained("someone/wan", **options)


def test_a_pushed_config_comes_back_equal_by_branch_and_by_commit_and_from_the_cache(hub, config, monkeypatch):
    url = config.push_to_hub("someone/wan", token=WRITE_TOKEN)
    assert url.startswith(f"{hub.url}/someone/wan/commit/")
    slower = make_config(environment={"gpu": "another"})
    assert slower.push_to_hub("wan", token=WRITE_TOKEN).startswith(f"{hub.url}/someone/wan/commit/")
    assert same(load(), slower)
    assert same(load(revision=url.rsplit("/", 1)[1]), config)
    config.push_to_hub("someone/wan", token=WRITE_TOKEN, revision="trial")
    assert same(load(revision="trial"), config)
    assert same(load(), slower)
    assert same(load(local_files_only=True), slower)
    hub.fail(".*", 500, times=99)
    assert same(load(), slower)  # the Hub is down
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    asked = len(hub.requests)
    assert same(load(), slower)
    assert len(hub.requests) == asked


def test_a_push_uploads_four_files_and_leaves_none_behind(hub, config, monkeypatch, tmp_path):
    monkeypatch.setattr("adaptiveload_hf.card.can_draw", lambda: True)
    config.push_to_hub("someone/wan", token=WRITE_TOKEN)
    files = hub.files("someone/wan")
    assert files.keys() == {"bucket_config.json", "measurements.jsonl", "README.md", "fit.png"}
    assert files["README.md"].startswith(b"---\nbase_model: Wan-AI/Wan2.1-T2V-1.3B-Diffusers\n")
    assert b'BucketConfig.from_pretrained("someone/wan")' in files["README.md"]
    assert not [content for content in files.values() if str(tmp_path).encode() in content]
    assert not list(tmp_path.glob("bucket_config_*"))


def test_a_second_push_adds_only_what_is_missing(hub, config):
    config.push_to_hub("someone/wan", token=WRITE_TOKEN)
    config.push_to_hub("someone/wan", token=WRITE_TOKEN)
    make_config(environment={"gpu": "another"}).push_to_hub("someone/wan", token=WRITE_TOKEN)
    files = ["README.md", "bucket_config.json", "measurements.jsonl"]
    assert hub.repositories["someone/wan"].uploads == [files, files[:2]]


def test_a_counted_config_is_pushed_without_measurements_and_comes_back_equal(hub):
    counted = BucketConfig.from_flops(WAN, batch_sizes={"1x60x104": 8})
    counted.push_to_hub("someone/wan", token=WRITE_TOKEN)
    assert hub.files("someone/wan").keys() == {"bucket_config.json", "README.md"}
    assert same(load(), counted)


def test_the_way_with_hf_xet_takes_a_config_too(hub, config, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    hub.fail(COMMIT, 503)
    config.push_to_hub("someone/wan", token=WRITE_TOKEN)
    assert same(load(), config)
    hub.fail(COMMIT, 403)
    with pytest.raises(UserError, match="refuses to write"):
        make_config(environment={}).push_to_hub("someone/wan", token=WRITE_TOKEN)


def test_private_is_kept_and_never_ignored(hub, config):
    config.push_to_hub("someone/wan", token=WRITE_TOKEN, private=True)
    assert hub.repositories["someone/wan"].private
    with pytest.raises(UserError, match=r"someone/wan is no folder here and no Hub repository .* token="):
        load()
    assert same(load(token=READ_TOKEN), config)
    config.push_to_hub("someone/open", token=WRITE_TOKEN)
    with pytest.raises(
        UserError, match=r"someone/open exists and is public, but private=True .* without --private"
    ) as it:
        config.push_to_hub("someone/open", token=WRITE_TOKEN, private=True)
    assert "private=None" not in str(it.value)
    assert len(hub.repositories["someone/open"].uploads) == 1


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("header", [{"Retry-After": "7"}, {"RateLimit": '"api";r=0;t=7'}])
def test_the_pause_that_the_hub_asks_for_is_kept_at_every_stage(hub, config, stage, header):
    hub.fail(stage, 429, header)
    config.push_to_hub("someone/wan", token=WRITE_TOKEN)
    assert hub.pauses == [8]
    assert "bucket_config.json" in hub.files("someone/wan")


@pytest.mark.parametrize(
    ("status", "headers", "words"),
    [
        (500, {}, "Pushing to someone/wan failed: "),
        ("drop", {}, "Pushing to someone/wan failed: "),
        (403, {}, "refuses to write to someone/wan (status 403). Log in with `hf auth login`"),
        (429, {"Retry-After": "200"}, "takes no more requests now (status 429, it asks to wait 200 s)"),
    ],
)
def test_a_failure_in_the_end_keeps_the_files_and_says_how_to_upload_them(hub, config, status, headers, words):
    hub.fail(COMMIT, status, headers, times=99)
    with pytest.raises(UserError) as failed:
        config.push_to_hub("someone/wan", token=WRITE_TOKEN, private=True)
    assert words in str(failed.value)
    assert sum(hub.pauses) <= 330
    command = shlex.split(str(failed.value).split("To upload it later: ")[1])
    assert command[:3] == ["hf", "upload", "someone/wan"] and command[-1] == "--private"
    assert command[5:-1:2] == ["--include"] * 3
    assert same(BucketConfig.from_pretrained(command[3]), config)


def test_a_config_that_could_not_be_pushed_from_its_folder_is_whole_there(hub, config, tmp_path):
    hub.fail(COMMIT, 403)
    with pytest.raises(UserError, match=f"It is saved in {tmp_path / 'saved'}. To upload it later: hf upload"):
        config.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="someone/wan", token=WRITE_TOKEN)
    assert same(BucketConfig.from_pretrained(tmp_path / "saved"), config)
    (tmp_path / "saved" / "checkpoint.safetensors").write_bytes(b"weights")
    config.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="someone/wan", token=WRITE_TOKEN)
    assert same(load(), config)
    assert "checkpoint.safetensors" not in hub.files("someone/wan")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, r"refuses to write to someone/wan \(status 401\)"),
        ({"token": READ_TOKEN}, r"refuses to write to someone/wan \(status 403\)"),
        ({"token": WRITE_TOKEN, "repo_id": "some one/x"}, "is no Hub id: .* Give it as user/repo"),
        ({"token": WRITE_TOKEN, "repo_id": ""}, "'' is no Hub id: .* Give it as user/repo"),
        ({"repo_id": "wan"}, "Nobody is logged in here, and wan names no user. Log in with `hf auth login`"),
    ],
)
def test_a_push_that_may_not_be_is_refused_at_once(hub, config, options, words):
    with pytest.raises(UserError, match=words):
        config.push_to_hub(**{"repo_id": "someone/wan", **options})
    assert not hub.pauses


@pytest.mark.parametrize("repo_id", ["wan", "someone/wan"])
def test_a_push_while_the_hub_is_switched_off_is_refused_at_once_and_names_the_setting(
    hub, config, monkeypatch, repo_id
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=f"Nothing is pushed to {repo_id} while HF_HUB_OFFLINE .* is set. Unset it"):
        config.push_to_hub(repo_id, token=WRITE_TOKEN)
    assert not hub.pauses and not hub.requests


def test_a_hub_that_stumbles_once_is_asked_again_for_a_config(hub, config):
    config.push_to_hub("someone/wan", token=WRITE_TOKEN)
    hub.fail("GET /api/models/someone/wan/revision/main", 503)
    assert same(load(), config)
    assert hub.pauses == [2]


def test_what_is_not_on_the_hub_is_named(hub, config):
    with pytest.raises(UserError, match="someone/wan is no folder here and no Hub repository"):
        load()
    with pytest.raises(UserError, match="someone/wan is no folder here and could not be loaded"):
        load(local_files_only=True)
    config.push_to_hub("someone/wan", token=WRITE_TOKEN)
    with pytest.raises(UserError, match="someone/wan has no revision 'v9'"):
        load(revision="v9")


def test_a_model_is_pushed_without_its_checkpoints(hub, model):
    push_model(model)
    assert sorted(hub.files("someone/model")) == [
        *("README.md", "transformer/a.safetensors", "transformer/b.safetensors")
    ]


def test_a_dropped_upload_of_a_model_goes_on_with_what_is_missing(hub, model):
    hub.fail(r"PUT /lfs/.*", "drop")
    push_model(model)
    assert hub.pauses == [1]
    (model / "transformer" / "b.safetensors").write_bytes(b"another")
    hub.requests.clear()
    push_model(model)
    assert len([request for request in hub.requests if request.startswith("PUT")]) == 1


def test_a_model_that_cannot_be_uploaded_says_why_and_its_second_push_sends_one_file(hub, model):
    second = r"PUT /lfs/" + sha256(bytes(3000))
    hub.fail(second, 500, times=99)
    with pytest.raises(UserError, match=r"Pushing to someone/model failed: .*500.*It is saved in .*/run\. To upload"):
        push_model(model)
    hub.failures.clear()
    hub.requests.clear()
    push_model(model)
    assert [request for request in hub.requests if request.startswith("PUT")] == [second]


def test_a_card_that_the_hub_refuses_is_named(hub, model):
    (model / "README.md").write_text("---\nbase_model: /data/models/wan\n---\n# model\n")
    with pytest.raises(UserError, match=r"someone/model was not pushed: .*\"/data/models/wan\" is not valid"):
        push_model(model)


def test_a_local_base_model_in_a_hand_edited_config_is_left_out_of_the_card(hub):
    config = BucketConfig(**{**make_config().config, "model": {**make_config().model, "base_model": "/data/wan"}})
    config.push_to_hub("someone/wan", token=WRITE_TOKEN)
    assert b"/data/wan" not in hub.files("someone/wan")["README.md"]


def push_and_wait(hub_url, folder):
    """What each rank of a run does at its end."""
    from pathlib import Path

    with pytest.MonkeyPatch.context() as monkeypatch:
        visit(monkeypatch, LocalHub(url=hub_url), Path(folder))
        accelerator = make_accelerator()
        with all_ranks_fail_together(accelerator):
            if accelerator.is_main_process:
                push_model(Path(folder))
            accelerator.wait_for_everyone()


@pytest.mark.distributed
def test_a_failed_push_ends_all_ranks_with_an_error(model):
    with local_hub() as hub:
        hub.fail(COMMIT, 403)
        with pytest.raises(torch.multiprocessing.ProcessExitedException) as ended:
            on_ranks(2, push_and_wait, hub.url, str(model))
    assert ended.value.exit_code == 1
    assert (model / "transformer" / "a.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Wan-AI/Wan2.1", True), ("/data/wan", False), ("wan", False), ("a/b/c", False), ("./wan", False), (None, False)],
)
def test_only_user_and_repository_count_as_a_hub_id(name, expected):
    assert is_hub_id(name) is expected


def test_a_local_folder_that_reads_like_a_hub_id_is_none(tmp_path, monkeypatch):
    (tmp_path / "runs" / "wan").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("runs/wan")


def command(*arguments):
    """(exit status, stdout, stderr) of an `adaptiveload` command in this process."""
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.ExitStack() as streams:
        out, err = streams.enter_context(contextlib.redirect_stdout(Output())), io.StringIO()
        streams.enter_context(contextlib.redirect_stderr(err))
        monkeypatch.setattr("sys.argv", ["adaptiveload", *map(str, arguments)])
        monkeypatch.setattr("warnings.showwarning", print)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    words = ended.value.code if isinstance(ended.value.code, str) else ""
    return 1 if words else ended.value.code, out.getvalue(), err.getvalue() + words


class Output(io.StringIO):
    def reconfigure(self, **_):
        """As sys.stdout's."""


def test_commands_push_and_plan_from_a_branch(hub, config, tmp_path, monkeypatch):
    config.save_pretrained(tmp_path / "config")
    (tmp_path / "shapes.json").write_text('{"1x60x104": 300, "21x60x104": 40}')
    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    status, out, err = command("push", tmp_path / "config", "someone/wan", "--private", "--revision", "trial")
    assert status == 0 and out.startswith(f"{hub.url}/someone/wan/commit/")
    following = "--dataset DATASET --world-size 8 --gradient-accumulation-steps 2 --revision trial"
    assert err.splitlines()[-1] == f"next: adaptiveload plan someone/wan {following}"
    assert hub.repositories["someone/wan"].private and not hub.files("someone/wan")
    options = ("--shapes", tmp_path / "shapes.json", "--world-size", 8)
    status, out, err = command("plan", "someone/wan", *options, "--revision", "trial")
    assert status == 0 and "21x60x104" in out and "--revision trial" in err.splitlines()[-1]
    assert command("plan", "someone/wan", *options)[0] == 1
    status, out, err = command("push", tmp_path / "config", "mine")
    assert status == 0 and "next: adaptiveload plan someone/mine --dataset" in err, (
        "which `plan` could not find by `mine`"
    )
    hub.fail(COMMIT, 403)
    status, out, err = command("push", tmp_path / "config", "someone/other")
    assert (status, out) == (1, "")
    folder = tmp_path / "config"
    assert f"It is saved in {folder}. To upload it later: hf upload someone/other {folder} . --include" in err
    assert not list(tmp_path.glob("bucket_config_*")), "the folder is the copy"


def test_a_config_is_counted_from_a_model_on_the_hub(hub, tmp_path):
    hub.repositories["someone/pipe"] = Repository()
    hub.repositories["someone/pipe"].add({"transformer/config.json": json.dumps(WAN).encode(), "vae/big": bytes(9)})
    sizes = ("--batch-size", "1x60x104=8", "--batch-size", "21x60x104=1")
    status, out, err = command("count", "someone/pipe", "--output", tmp_path / "counted", *sizes)
    assert status == 0 and "WanTransformer3DModel" in out and "counted, not measured" in err
    assert "GET /someone/pipe/resolve" not in " ".join(r for r in hub.requests if "vae" in r)
    counted = BucketConfig.from_pretrained(tmp_path / "counted")
    assert {str(shape): size for shape, size in counted.batch_sizes.items()} == {"1x60x104": 8, "21x60x104": 1}
    status, _, err = command("count", "someone/pipe", "--output", tmp_path / "x", "--batch-size", "21x60x104")
    assert status == 1 and "--batch-size takes a shape and a number, such as 21x60x104=1" in err
