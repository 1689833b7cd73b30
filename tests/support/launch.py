"""Starts scripts on several CPU processes, as a user would: through accelerate's or torch's launcher."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CPU_CONFIG = ROOT / "accelerate_configs" / "cpu.yaml"


def command_of(script, *arguments, config=CPU_CONFIG) -> list[str]:
    """`accelerate launch --config_file <config> script arguments`."""
    start = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", 0]
    return list(map(str, [*start, script, *arguments]))


def environment_of() -> dict[str, str]:
    """One thread, offline, without a GPU; the package and tests/ are importable."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }


def launch(script, *arguments, config=CPU_CONFIG, timeout=240, **environment) -> subprocess.CompletedProcess:
    """Runs `command_of(...)` to its end, output captured."""
    return run(command_of(script, *arguments, config=config), timeout=timeout, **environment)


def run(command, timeout=240, **environment) -> subprocess.CompletedProcess:
    """Runs a command from the repository's root, output captured."""
    return subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env=environment_of() | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
