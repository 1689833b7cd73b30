"""Do the examples run as their first lines say, on a CPU?"""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from support.accelerators import FSDP2, fresh_accelerate
from support.caches import save_musubi
from support.prepared import save_config
from support.worlds import on_ranks

EXAMPLES = Path(__file__).parents[2] / "recipes" / "examples"
ALL = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix == ".py")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example in this process; its stdout."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with fresh_accelerate(ACCELERATE_USE_CPU="true"):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def _run_loop(*words):
    """One rank of accelerate_loop.py; what it prints."""
    import contextlib
    import io

    printed = io.StringIO()
    sys.argv = ["accelerate_loop.py", *words]
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / "accelerate_loop.py"), run_name="__main__")
    return re.findall(r"step (\d+): (\S+) on rank 0, loss (\S+)\n", printed.getvalue())


def loop(setup, output_dir, steps, world_size=2, run=_run_loop):
    words = [str(word) for word in (setup.pipeline, setup.dataset, setup.config, output_dir, steps)]
    return on_ranks(world_size, run, *words, timeout=240, **FSDP2)[0]


def test_the_loop_trains_two_sharded_ranks_and_goes_on_exactly_where_it_stopped(setup, tmp_path):
    straight = loop(setup, tmp_path / "straight", 4)
    assert [int(step) for step, _, _ in straight] == [1, 2, 3, 4]
    parts = [*loop(setup, tmp_path / "parts", 2), *loop(setup, tmp_path / "parts", 4)]
    assert parts == straight
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["checkpoint-2", "checkpoint-4"]


def _run_killed_in_its_save(*words):
    import accelerate.accelerator

    def die(*_, **__):
        raise KeyboardInterrupt

    accelerate.accelerator.save_accelerator_state = die  # comes after the model and the optimizer
    with pytest.raises(KeyboardInterrupt):
        _run_loop(*words)


def test_the_loop_goes_on_from_the_whole_checkpoint_before_a_save_that_was_killed(setup, tmp_path):
    straight = loop(setup, tmp_path / "straight", 3, world_size=1)
    parts = loop(setup, tmp_path / "parts", 1, world_size=1)
    loop(setup, tmp_path / "parts", 2, world_size=1, run=_run_killed_in_its_save)
    assert [*parts, *loop(setup, tmp_path / "parts", 3, world_size=1)] == straight


def test_a_diffusers_script_is_patched_by_one_line(run, setup):
    out = run("patched_script.py", setup.pipeline)
    assert out.startswith("Fused: 5 of 5 modulations")
    assert float(out.splitlines()[-1].removeprefix("loss ")) > 0


def test_a_config_of_others_plans_the_readers_own_data(run, tmp_path):
    config = save_config(tmp_path / "config", {"1x60x104": 8000, "21x60x104": 500})
    out = run("pushed_config.py", config)
    assert re.search(r"^1x60x104: 8000 samples, batch size \d+, ", out, re.MULTILINE)
    assert re.search(r"^21x60x104: 500 samples, batch size 1, ", out, re.MULTILINE)


def test_a_cache_of_musubi_tuner_is_dealt_without_measuring(run, setup, tmp_path):
    for number in range(6):
        frames = 1 if number < 4 else 3
        save_musubi(tmp_path, f"clip{number}", torch.randn(16, frames, 4, 6), torch.randn(7, 32))
    out = run("cached_latents.py", tmp_path, setup.pipeline)
    lines = out.splitlines()
    assert lines[0] == "6 samples"
    assert sum(line.count("a cat") for line in lines[1:]) == 6
    assert {line.split()[0] for line in lines[1:]} == {"1x4x6", "3x4x6"}
    assert all("512, 32]" in line for line in lines[1:])


def test_every_example_has_a_test():
    text = Path(__file__).read_text(encoding="utf-8")
    assert ALL and all(f'"{name}"' in text for name in ALL)
    assert len((EXAMPLES / "accelerate_loop.py").read_text(encoding="utf-8").splitlines()) <= 79
