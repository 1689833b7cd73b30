"""Do the code blocks of README, CONTRIBUTING and docs/ run? A block that cannot begins with `# Not run in tests: why`.

Python blocks run, page by page, as one script in a folder with what the page speaks of. Of bash blocks `adaptiveload`
runs; recipes, launchers, make and pip must take the words, and tests of their own run them.
"""

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from support.accelerators import fresh_accelerate
from support.caches import sample_members, save_musubi, save_shard
from support.clips import moving_bar, write_clip
from support.hub_server import WRITE_TOKEN, visited_hub
from support.launch import environment_of
from support.measured import make_config, measure, save_dataset
from support.prepared import save_config, save_prepared
from support.reader import what_the_reader_has
from support.train_ranks import COUNTS, save_small_transformer
from support.training_logs import write_log
from torch.distributed.run import get_args_parser

from adaptiveload_hf import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = "# Not run in tests: "
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMES_OF_OTHERS = ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "PIPELINE")  # folders here, so that nothing is downloaded


def blocks(page):
    """(first line's number, language, text) of each."""
    text = page.read_text(encoding="utf-8")
    return [(text[: m.start()].count("\n") + 2, m[1], m[2]) for m in FENCE.finditer(text)]


def blocks_in(*languages):
    for page in PAGES:
        for line, language, text in blocks(page):
            if language in languages:
                why = text.removeprefix(NOT_RUN).splitlines()[0] if text.startswith(NOT_RUN) else None
                marks = pytest.mark.skip(reason=why) if why else ()
                yield pytest.param(page, text, id=f"{page.name}:{line}", marks=marks)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is(page):
    assert [line for line, language, _ in blocks(page) if language not in ("python", "bash", "text", "json")] == []


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A checkout with what pages speak of beside it: tiny, and with shapes enough for plans of 64 ranks."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("recipes", "tests", "accelerate_configs", "csrc"):
        (folder / name).symlink_to(ROOT / name)
    make_config().save_pretrained(folder / "config")
    for name in ("CONFIG", "user/wan-1.3b-h200"):
        shutil.copytree(folder / "config", folder / name)
    counts = {"1x60x104": 300, "5x60x104": 90, "13x60x104": 40, "21x60x104": 30}
    for name in ("prepared", "DATASET", "user/latents"):
        save_dataset(folder / name, counts)
    (folder / "shapes.json").write_text(json.dumps(counts))
    (folder / "clips").mkdir()
    write_clip(folder / "clips" / "cat.mp4", moving_bar(9, 32, 32), rate=24)
    (folder / "run").mkdir()
    log = write_log(folder / "run" / "metrics.jsonl", make_config().cost_model, steps=120)
    log.write_text(log.read_text().replace('"seconds"', '"loss": 1.0, "seconds"'))
    (folder / "measurements.jsonl").write_text("".join(m.to_json() + "\n" for m in measure()))
    for name in NAMES_OF_OTHERS:
        save_small_transformer(folder / name / "transformer")
    return folder


@pytest.fixture(autouse=True)
def no_pictures_of_configs(monkeypatch):
    monkeypatch.setattr("adaptiveload_hf.card.can_draw", lambda: False)


@pytest.fixture
def here(place, monkeypatch, tmp_path):
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    with visited_hub(monkeypatch, tmp_path) as hub:
        monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
        yield hub


@pytest.mark.parametrize(("page", "text"), blocks_in("bash"))
def test_the_commands_of_a_page_are_taken(page, text, here, monkeypatch):
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            run_command(words, monkeypatch)


def run_command(words, monkeypatch):
    """Environment variables before it, and `export`, are left out: they are the launchers' own."""
    words = list(itertools.dropwhile(lambda word: word == "export" or re.match(r"[A-Z_]+=", word), words))
    program, *rest = words or ["export"]
    if program == "adaptiveload":
        run_adaptiveload(rest, monkeypatch)
    elif program == "python" and not rest[0].startswith("-"):
        check_recipe(*rest, monkeypatch=monkeypatch)
    elif program == "torchrun" or words[:2] == ["accelerate", "launch"]:
        parser = get_args_parser() if program == "torchrun" else launch_command_parser()
        parsed = parser.parse_args([word for word in rest if word not in ("launch", "...")])
        assert (ROOT / (getattr(parsed, "config_file", None) or "")).exists()
        arguments = parsed.training_script_args if "..." not in words else None
        check_recipe(parsed.training_script, *(arguments or ()), monkeypatch=monkeypatch, whole=arguments is not None)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert [word for word in rest if "=" not in word and word not in targets] == []
    elif words in (
        ["pip", "install", "build"],
        ["python", "-m", "build"],
        ["python", "-m", "build", "--no-isolation"],
    ):
        pass  # as test_build.py does, without the download
    elif words[:2] == ["pip", "install"]:
        (what,) = [word for word in rest[1:] if not word.startswith("-")]
        extras = re.search(r"\[options.extras_require\]\n(.*?)\n\n", (ROOT / "setup.cfg").read_text(), re.DOTALL)[1]
        assert what.startswith(".")
        assert set(filter(None, what[1:].strip("[]").split(","))) <= set(re.findall(r"^(\w+) =", extras, re.MULTILINE))
    elif program != "export":
        raise AssertionError(f"no test knows {program}: begin the block with {NOT_RUN!r} and the reason")


def run_adaptiveload(words, monkeypatch):
    words, output = (words[:-2], words[-1]) if ">" in words else (words, None)
    monkeypatch.setattr(sys, "argv", ["adaptiveload", *words])
    with open(output or "stdout.txt", "w") as file, contextlib.redirect_stdout(file), pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code in (0, None), words


def check_recipe(script, *arguments, monkeypatch, whole=True):
    """The script is there, and takes these arguments, if they are all."""
    path = ROOT / script
    assert path.is_file(), script
    monkeypatch.syspath_prepend(path.parent)
    if whole and "def parse_args" in path.read_text():
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        __import__(path.stem).parse_args()


@pytest.mark.slow
@pytest.mark.distributed
def test_the_quickstart_runs_word_for_word(tmp_path):
    for name in ("recipes", "accelerate_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    script = "".join(text for _, language, text in blocks(ROOT / "docs" / "quickstart.md") if language == "bash")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = environment_of() | {"PATH": path}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(["bash", "-ec", script], check=False, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 11))
    assert "<html" in (tmp_path / "report.html").read_text()


PYTHON_PAGES = [page for page in PAGES if any(language == "python" for _, language, _ in blocks(page))]


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """Data and a config that tiny models train with."""
    folder = tmp_path_factory.mktemp("desk")
    save_prepared(folder / "prepared", COUNTS)
    save_config(folder / "config", [*COUNTS, "1x4x6", "1x32x32", "5x32x32"], memory=True)
    for number in range(4):
        save_musubi(folder / "cache", f"clip{number}", torch.randn(16, 1, 4, 6), torch.randn(7, 32))
    save_shard(folder / "shards" / "0.tar", sample_members("first", torch.randn(16, 1, 4, 6)))
    return folder


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs_as_one_script(page, desk, monkeypatch, tmp_path):
    shutil.copytree(desk, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with visited_hub(monkeypatch, tmp_path / "hub"), fresh_accelerate(ACCELERATE_USE_CPU="true"):
        monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
        vars(module).update(what_the_reader_has(page.name))
        for line, language, text in blocks(page):
            if language == "python" and not text.startswith(NOT_RUN):
                script = tmp_path / f"{page.stem}_{line}.py"
                script.write_text(text)  # a file, since patching reads the source of classes
                exec(compile(text, script, "exec"), vars(module))
