"""Does the demo leave your own files alone? (`make demo` itself is run by hand: it takes minutes.)"""

import os
import subprocess
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "recipes" / "demo.sh"


@pytest.mark.parametrize(("data", "said"), [("clips", "lies in"), ("gone", "there is no folder")])
def test_data_that_is_not_there_or_lies_in_the_output_ends_the_demo_before_it_removes_anything(tmp_path, data, said):
    clip = tmp_path / "output/clips/mine.mp4"
    clip.parent.mkdir(parents=True)
    clip.touch()
    command = ["bash", DEMO, tmp_path / "output" / data]
    environment = {**os.environ, "DEMO_OUTPUT": str(tmp_path / "output")}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("demo: ") and said in ended.stderr
    assert clip.exists()
