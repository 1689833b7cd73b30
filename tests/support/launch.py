"""Starts scripts on several CPU processes, as a user would: through accelerate's or torch's launcher."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CPU_CONFIG = ROOT / "accelerate_configs" / "cpu.yaml"


def launch(script, *arguments, config=CPU_CONFIG, timeout=120, **environment) -> subprocess.CompletedProcess:
    """`accelerate launch --config_file <config> script arguments`, output captured."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", 0]
    return run([*command, script, *arguments], timeout=timeout, **environment)


def run(command, timeout=120, **environment) -> subprocess.CompletedProcess:
    """Runs a command from the repository's root with one thread, offline and without a GPU."""
    settings = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        **environment,
    }
    return subprocess.run(
        list(map(str, command)), cwd=ROOT, env=settings, capture_output=True, text=True, timeout=timeout, check=False
    )
