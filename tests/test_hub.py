"""Does a bucket config reach the Hub and come back over real HTTP, and is every failure said plainly?"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.hub_server import local_hub

from adaptiveload_hf.hub import is_hub_id

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def visit(tmp_path_factory):
    """(what the client said, the server): one process, since huggingface_hub reads HF_ENDPOINT when imported."""
    work = tmp_path_factory.mktemp("hub")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    with local_hub() as hub:
        environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(work / "home")}
        environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
        hub.commit_failures = {"someone/saved": [500]}
        client = [sys.executable, str(ROOT / "tests" / "support" / "hub_client.py"), str(work)]
        result = subprocess.run(client, env=environment, capture_output=True, text=True, cwd=ROOT, check=False)
        assert result.returncode == 0, result.stderr
        yield json.loads(result.stdout), hub


@pytest.mark.parametrize(
    "step",
    ["load", "load newest", "load first", "load cached", "load private", "load counted", "kept after failure"],
)
def test_a_pushed_config_comes_back_equal(visit, step):
    assert visit[0][step] is True


def test_a_push_uploads_the_config_its_measurements_and_its_card(visit):
    files = visit[1].files("someone/wan")
    assert files.keys() == {"bucket_config.json", "measurements.jsonl", "README.md", "fit.png"}
    assert files["README.md"].startswith(b"---\nbase_model: Wan-AI/Wan2.1-T2V-1.3B-Diffusers\n")
    assert b'BucketConfig.from_pretrained("someone/wan")' in files["README.md"]
    assert visit[0]["push"].startswith(f"{visit[1].url}/someone/wan/commit/")


def test_a_push_of_a_counted_config_uploads_no_measurements(visit):
    assert visit[1].files("someone/counted").keys() == {"bucket_config.json", "README.md"}


def test_an_equal_second_push_makes_no_commit(visit):
    assert len(visit[1].repositories["someone/wan"].commits) == 3  # the empty one, one config, the other config


def test_a_push_from_a_folder_uploads_nothing_else_in_it(visit):
    assert "checkpoint.safetensors" not in visit[1].files("someone/saved")
    assert "bucket_config.json" in visit[1].files("someone/saved")


def test_private_is_asked_for_and_kept(visit):
    assert visit[1].repositories["someone/secret"].private
    assert not visit[1].repositories["someone/wan"].private


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("no such repository", ["someone/wam is no folder here and no Hub repository", "hf auth login"]),
        ("no such revision", ["someone/wan has no revision 'v9'"]),
        ("load private without token", ["someone/secret is no folder here and no Hub repository", "token="]),
        ("not in the cache", ["someone/wan is no folder here and could not be loaded"]),
        ("push without token", ["refuses to write to someone/other (status 401)", "hf auth login"]),
        ("push with read token", ["refuses to write to someone/other (status 403)", "token that may write"]),
        ("push to no id", ["is no Hub id", "user/repo"]),
        ("push private to public", ["someone/wan exists and is public", "private=True"]),
        ("push fails", ["Pushing to someone/saved failed", "500", "hf upload someone/saved"]),
    ],
)
def test_a_failure_says_what_and_what_to_do(visit, step, words):
    said = visit[0][step]
    assert str(said).startswith("UserError: ")
    assert not [word for word in words if word not in said], said


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
