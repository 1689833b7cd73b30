"""Do patched models train right when sharded over processes, patched before or after, and load in other processes?"""

import json
import sys
from pathlib import Path

import pytest
import torch
from support.launch import run
from support.tiny_models import tiny_inputs, tiny_model

from adaptiveload_hf import patch_model

WORKER = Path(__file__).parent.parent / "support" / "patch_worker.py"


@pytest.mark.distributed
def test_fsdp2_and_ddp_gradients_equal_those_of_one_unpatched_process(tmp_path):
    model = tiny_model("wan")
    patch_model(model)
    torch.save(model, tmp_path / "model.pt")
    inputs = tiny_inputs("wan")
    with torch.no_grad():
        torch.save((inputs, model(**inputs, return_dict=False)[0]), tmp_path / "case.pt")

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]
    result = run([*torchrun, WORKER, tmp_path / "model.pt", tmp_path / "case.pt"])
    assert result.returncode == 0, result.stderr
    errors = json.loads(result.stdout.splitlines()[-1])
    assert len(errors) == 14
    assert all(error < 2e-5 for error in errors.values()), errors
