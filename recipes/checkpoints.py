"""How does a run leave checkpoints that a kill cannot spoil, and find the one to go on from?"""

import json
import os
import re
import shutil
import socket
import sys
import time
import uuid
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list, gather_object

from adaptiveload_hf import UserError

WAITS_FOR_STORAGE = 5  # of a second each


def checkpoints_in(output_dir: Path) -> dict[int, Path]:
    """Whole checkpoints by step; one that was cut short still has its temporary name."""
    found = {re.fullmatch(r"checkpoint-(\d+)", path.name): path for path in output_dir.glob("checkpoint-*")}
    return {int(match[1]): path for match, path in sorted(found.items(), key=lambda x: str(x[1])) if match}


def find_checkpoint(accelerator: Accelerator, output_dir: Path, wanted: str | None) -> Path | None:
    """The checkpoint to resume from, the same on all ranks; None starts afresh.

    Raises:
        UserError: `wanted` is not there; or nothing is wanted and the folder already holds a run.
    """
    found: list[str | None] = [None]
    if accelerator.is_main_process:
        output_dir.mkdir(parents=True, exist_ok=True)
        present = checkpoints_in(output_dir)
        names = ", ".join(path.name for path in present.values()) or "none"
        if wanted is None and present:
            raise UserError(
                f"{output_dir} already holds a run ({names}). Pass --resume_from_checkpoint latest to go on with it, "
                "or another --output_dir."
            )
        if wanted == "latest":
            if present:
                found[0] = str(present[max(present)])
            else:
                print(f"no checkpoint in {output_dir} yet: starting afresh", file=sys.stderr)
        elif wanted is not None:
            path = next((p for p in (Path(wanted), output_dir / wanted) if p.is_dir()), None)
            if path is None:
                raise UserError(
                    f"--resume_from_checkpoint {wanted}: no such folder; {output_dir} holds {names}. Pass one of "
                    "them, or 'latest'."
                )
            found[0] = str(path)
    broadcast_object_list(found)
    checkpoint = None if found[0] is None else Path(found[0])
    _check_shared(accelerator, output_dir, checkpoint)
    if checkpoint is not None:
        _check_kind(accelerator, checkpoint)
    return checkpoint


def _check_shared(accelerator: Accelerator, output_dir: Path, checkpoint: Path | None) -> None:
    """Sharded checkpoints are written by all ranks into one folder: refuses folders of their own.

    Raises:
        UserError: on all ranks, with what each machine sees.
    """
    if accelerator.num_processes == 1:
        return
    token = [f".seen-by-all-{uuid.uuid4().hex}"]
    broadcast_object_list(token)
    mark = output_dir / token[0]
    if accelerator.is_main_process:
        mark.touch()
    accelerator.wait_for_everyone()
    sees = _appears(mark) and (checkpoint is None or checkpoint.is_dir())
    present = ", ".join(path.name for path in checkpoints_in(output_dir).values()) or "no checkpoint"
    machines = gather_object([(socket.gethostname(), accelerator.process_index, sees, f"{output_dir}: {present}")])
    if accelerator.is_main_process:
        mark.unlink()
    if not all(seen for _, _, seen, _ in machines):
        lines = [
            f"rank {rank} on {host} {'sees' if seen else 'does not see'} what rank 0 wrote; it finds {found}"
            for host, rank, seen, found in machines
        ]
        raise UserError(
            "all ranks must write into one folder, or none could go on from its part of a checkpoint, but:\n  "
            + "\n  ".join(lines)
            + "\nGive an --output_dir (and checkpoint) on storage that all machines share."
        )


def _appears(path: Path) -> bool:
    """Whether a file is there within some seconds: network file systems may show it late."""
    for _ in range(WAITS_FOR_STORAGE):
        if path.exists():
            return True
        time.sleep(1)
    return path.exists()


def _check_kind(accelerator: Accelerator, checkpoint: Path) -> None:
    """Sharded checkpoints load on any number of ranks, but only where the model is sharded, and others only where not.

    Raises:
        UserError: naming both kinds.
    """
    written = "under FSDP2" if any(checkpoint.glob("pytorch_model_fsdp_0*")) else "without FSDP"
    now = "under FSDP2" if accelerator.distributed_type == DistributedType.FSDP else "without FSDP"
    if written != now:
        raise UserError(
            f"{checkpoint} was written {written}, but this run is {now}. Launch with "
            f"{'an FSDP2 config' if written == 'under FSDP2' else 'single.yaml or ddp.yaml'}; the number of processes "
            "may be another."
        )


def save_checkpoint(accelerator: Accelerator, output_dir: Path, step: int, total_limit: int | None) -> None:
    """Saves under a temporary name and renames, so that a save that is killed never becomes `latest`."""
    whole, partial = output_dir / f"checkpoint-{step}", output_dir / f"partial-checkpoint-{step}"
    if accelerator.is_main_process:
        for cut_short in output_dir.glob("partial-checkpoint-*"):
            shutil.rmtree(cut_short)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if whole.exists():  # of a run that was resumed from further back
            shutil.rmtree(whole)
        os.replace(partial, whole)
        present = checkpoints_in(output_dir)
        for old in sorted(present)[: -total_limit if total_limit else 0]:
            shutil.rmtree(present[old])
    accelerator.wait_for_everyone()


def keep_metrics_until(path: Path, step: int) -> None:
    """Drops the lines of steps that are about to be done again, so that each step has one line."""
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    if len(kept) < len(lines):
        partial = path.with_suffix(".partial")
        partial.write_text("".join(kept))
        os.replace(partial, path)
