"""Does --help of a trainer name every argument with what it is and its default, and what must be installed for it?"""

import ast
import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest

from adaptiveload_hf import UserError

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("recipe", ["train_wan", "train_sd3"])
def test_help_says_of_every_argument_what_it_is_and_its_default(recipe, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(recipe).parse_args(["--help"])
    said = capsys.readouterr().out
    options = re.split(r"\n  (?=--)", said)[1:]
    assert len(options) > 50
    for option in options:
        name, *words = option.split("\n\n")[0].split()
        described = [word for word in words if not re.fullmatch(r"N|\.\.\.\]?|\[\S+|[A-Z=x\]]+|\{.*\}", word)]
        assert described, f"{name} has no help"
    for part in ("--learning_rate N", "(default: 1e-05)", "(default: 0)", "A LoRA instead of all weights:"):
        assert part in said
    assert "None" not in said and "False" not in said


@pytest.mark.parametrize("recipe", ["train_wan", "train_sd3"])
def test_a_machine_that_only_trains_needs_no_video_decoder_and_no_peft(recipe):
    seen, ahead = set(), [recipe]
    while ahead:
        module = ahead.pop()
        path = RECIPES / f"{module}.py"
        new = module not in seen and path.exists()
        seen.add(module)
        if not new:
            continue
        for node in ast.parse(path.read_text()).body:  # what is imported inside a function is not looked at
            if isinstance(node, ast.Import):
                ahead += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                ahead.append(node.module)
    assert "training_loop" in seen and not {"av", "peft"} & seen


def test_a_rank_without_peft_is_refused_with_what_to_install(monkeypatch, capsys):
    parse_args = importlib.import_module("train_wan").parse_args
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        parse_args(["--rank", "4"])
    assert "argument --rank: a LoRA needs PEFT. Install it: pip install peft" in capsys.readouterr().err


def test_preparing_without_pyav_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UserError, match=r"Reading clips needs PyAV\. Install it: pip install av"):
        runpy.run_path(str(RECIPES / "media.py"))
