"""Does every command work on poor terminals: ASCII, piped, 40 columns, no home, another user?"""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest
from support.hub_server import WRITE_TOKEN, local_hub
from support.measured import make_config, measure, save_dataset

from adaptiveload_hf import cli

ROOT = Path(__file__).parent.parent
COUNTS = {"1x60x104": 300, "5x60x104": 90, "21x60x104": 30}
WAN = {"_class_name": "WanTransformer3DModel", "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12}
WAN |= {"in_channels": 16, "ffn_dim": 32, "text_dim": 4096, "freq_dim": 256, "patch_size": [1, 2, 2]}
LOOK = [["scan", "数据"], ["plan", "配置", "--dataset", "数据", "--world-size", "4"]]
LOOK += [["simulate", "配置", "--dataset", "数据", "--balance", "step"]]
LOOK += [["report", "配置", "--dataset", "数据", "--run", "运行", "--output", "报告.html"]]
MAKE = [["fit", "测量.jsonl", "--output", "拟合"], ["count", "模型", "--output", "计数", "--batch-size", "1x60x104=8"]]
PUSH = [["push", "配置", "someone/wan"]]


@pytest.fixture(scope="module")
def folder():
    """Everything that the commands need, under Chinese names, readable and writable by all."""
    with tempfile.TemporaryDirectory(prefix="看 ") as name:
        folder = Path(name)
        make_config().save_pretrained(folder / "配置")
        save_dataset(folder / "数据", COUNTS)
        (folder / "测量.jsonl").write_text("".join(m.to_json() + "\n" for m in measure()))
        (folder / "模型").mkdir()
        (folder / "模型" / "config.json").write_text(json.dumps(WAN))
        (folder / "运行").mkdir()
        (folder / "运行" / "metrics.jsonl").write_text(
            '{"step": 1, "loss": 1.0, "seconds": 2.0}\n{"step": 2, "loss": 0.5}'
        )
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o777 if path.is_dir() else 0o666)
        yield folder


def run_all(commands):
    """Every command in this process; the exit statuses that are not 0."""
    failed = []
    for command in commands:
        sys.argv = ["adaptiveload", *command]
        try:
            cli.main()
        except SystemExit as end:
            failed += [end.code] if end.code else []
        except BaseException:
            failed.append(traceback.format_exc())
    return failed


def in_new_process(code, folder, environment):
    """What a Python of its own prints, in ASCII: (standard output, error output)."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    clean |= {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii", "COLUMNS": "40", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, cwd=folder, env=clean | environment, check=False)
    out, err = result.stdout.decode("ascii"), result.stderr.decode("ascii")
    assert result.returncode == 0, err
    return out, err


def test_every_command_works_piped_in_ascii_without_a_home(folder):
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
    code += f"from test_cli_terminals import *\nprint(run_all({[*MAKE, *LOOK, *PUSH]!r}))\n"
    with local_hub() as hub:
        environment = {"HOME": "/proc/none", "OMP_NUM_THREADS": "1", "HF_TOKEN": WRITE_TOKEN}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
        out, err = in_new_process(code, folder, environment)
    assert out.splitlines()[-1] == "[]", err
    assert "Traceback" not in err
    assert "21x60x104 | 81x480x832 | " in out  # rich's lines, in ASCII
    assert "\\u62a5\\u544a.html" in out
    assert len([line for line in err.splitlines() if line.startswith("next: ")]) == len([*MAKE, *LOOK, *PUSH])
    assert (folder / "报告.html").is_file()
    assert "bucket_config.json" in hub.files("someone/wan")


def test_every_command_works_for_another_user_who_has_no_home(folder):
    # All run as the first user before: what they import may lie where the other may not read.
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
    code += f"from test_cli_terminals import *\nprint(run_all({LOOK!r}))\n"
    code += "if os.getuid() == 0:\n    os.setgid(12345)\n    os.setuid(12345)\n"
    code += f"print(run_all({[[word.replace('报告', '别人') for word in command] for command in LOOK]!r}))\n"
    out, err = in_new_process(code, folder, {"HOME": "/nonexistent"})
    assert out.splitlines()[-1] == "[]", err
    assert "Traceback" not in err
    assert "21x60x104" in out
    assert (folder / "别人.html").is_file()


def test_a_terminal_too_narrow_for_the_table_shows_every_cell_whole(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run_all([LOOK[1]]) == []
    out = capsys.readouterr().out
    assert "shape       21x60x104\npixels      81x480x832\n" in out
    assert max(map(len, out.splitlines())) <= 40
