"""How does a run leave checkpoints that a kill cannot spoil, and find the one to go on from?"""

import contextlib
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path

import xxhash
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from accelerate.utils.constants import SCALER_NAME
from run_folder import check_shared
from stopping import resume_command
from training_arguments import adam_options
from wrapped_model import plain_name, unwrapped

from adaptiveload_hf import UserError
from adaptiveload_hf.preflight import WRITE_ERRORS, write_problem

CONTENTS = "contents.json"  # of a checkpoint: its files, with bytes and checksum, and which weights are in them
# Options of which a run that goes on with others says so: what its weights are trained from, for and how.
_OBJECTIVE = {"pretrained_model_name_or_path", "revision", "from_scratch", "first_frame_given", "mixed_precision"}
_OBJECTIVE |= {"weighting_scheme", "logit_mean", "logit_std", "mode_scale", "shift", "shift_shape"}
_OBJECTIVE |= {"loss_normalization", "proportion_empty_prompts", "max_grad_norm"}
_OBJECTIVE |= {"lr_scheduler", "lr_warmup_steps", "lr_num_cycles", "lr_power"}


def checkpoints_in(output_dir: Path) -> dict[int, Path]:
    """Whole checkpoints by step; one that was cut short still has its temporary name."""
    found = {re.fullmatch(r"checkpoint-(\d+)", path.name): path for path in output_dir.glob("checkpoint-*")}
    return {int(match[1]): path for match, path in sorted(found.items(), key=lambda x: str(x[1])) if match}


def find_checkpoint(accelerator: Accelerator, output_dir: Path, wanted: str | None) -> Path | None:
    """The checkpoint to resume from, the same on all ranks; None starts afresh.

    Raises:
        UserError: `wanted` is not there, or not whole; or nothing is wanted and the folder already holds a run; or
            ranks do not share the folder.
    """
    found: list[str | None] = [None]
    if accelerator.is_main_process:
        found[0] = _choose(output_dir, wanted)
    broadcast_object_list(found)
    checkpoint = None if found[0] is None else Path(found[0])
    names = ", ".join(path.name for path in checkpoints_in(output_dir).values()) or "no checkpoint"
    check_shared(accelerator, output_dir, names, checkpoint)
    if checkpoint is not None:
        _check_whole(accelerator, checkpoint)
        _check_kind(accelerator, checkpoint)
    return checkpoint


def _choose(output_dir: Path, wanted: str | None) -> str | None:
    present = checkpoints_in(output_dir)
    names = ", ".join(path.name for path in present.values()) or "none"
    if wanted is None and present:
        raise UserError(
            f"{output_dir} already holds a run ({names}). Pass --resume_from_checkpoint latest to go on with it, "
            "or another --output_dir."
        )
    if wanted is None:
        return None
    if wanted != "latest":
        path = next((p for p in (Path(wanted), output_dir / wanted) if p.is_dir()), None)
        if path is None:
            raise UserError(
                f"--resume_from_checkpoint {wanted}: no such folder; {output_dir} holds {names}. Pass one of "
                "them, or 'latest'."
            )
        steps = {other.resolve(): step for step, other in present.items()}
        step = steps.get(path.resolve())
        if present and step is None:
            raise UserError(
                f"{output_dir} already holds a run ({names}), of which --resume_from_checkpoint {wanted} is none. "
                "Pass one of these, or another --output_dir."
            )
        later = [present[other].name for other in present if other > step]
        if later:
            print(
                f"going on from {path.name}, though {output_dir} holds {', '.join(later)} of later steps. The first "
                "checkpoint of this run renames them outdated-..., or with --checkpoints_total_limit removes them",
                file=sys.stderr,
            )
        return str(path)
    if present:
        return str(present[max(present)])
    print(f"no checkpoint in {output_dir} yet: starting afresh", file=sys.stderr)
    return None


def _check_kind(accelerator: Accelerator, checkpoint: Path) -> None:
    """Sharded checkpoints load on any number of ranks, but only where the model is sharded, and others only where not.

    Raises:
        UserError: naming both kinds; or this run scales its loss, and that one did not.
    """
    written = "under FSDP2" if any(checkpoint.glob("pytorch_model_fsdp_0*")) else "without FSDP"
    now = "under FSDP2" if accelerator.distributed_type == DistributedType.FSDP else "without FSDP"
    if accelerator.scaler is not None and not (checkpoint / SCALER_NAME).exists():
        raise UserError(
            f"{checkpoint} was not written in fp16 and has no scale of its loss, {SCALER_NAME}. Go on with the "
            "--mixed_precision of that run, or begin another with its result."
        )
    if written != now:
        raise UserError(
            f"{checkpoint} was written {written}, but this run is {now}. Launch with "
            f"{'an FSDP2 config' if written == 'under FSDP2' else 'single.yaml or ddp.yaml'}; the number of processes "
            "may be another."
        )


def _check_whole(accelerator: Accelerator, checkpoint: Path) -> None:
    """Refuses a checkpoint that is not as it was saved: a copy that was cut short, a disk or a memory that failed.

    Raises:
        UserError: on all ranks, with the first file that differs.
    """
    saved, sizes = _contents(checkpoint)["files"], _sizes(checkpoint)
    for name, (size, _) in saved.items():
        if sizes.get(name) != size:
            raise UserError(
                f"{checkpoint} is damaged: {name} was saved with {size} bytes, but "
                + (f"has {sizes[name]}. " if name in sizes else "is gone. ")
                + f"{_others(checkpoint)}"
            )
    if accelerator.is_main_process:
        gib = sum(size for size, _ in saved.values()) / 2**30
        print(f"reading {gib:.1f} GiB of {checkpoint} for their checksums", file=sys.stderr, flush=True)
    found = _checksums(accelerator, checkpoint, list(saved))
    for name, (_, checksum) in saved.items():
        if found[name] != checksum:
            raise UserError(
                f"{checkpoint} is damaged: {name} has another content than was saved (checksum {found[name]}, it was "
                f"{checksum}). {_others(checkpoint)}"
            )


def _checksums(accelerator: Accelerator, folder: Path, names: list[str]) -> dict[str, str]:
    """XXH3 of the files, by name; each rank reads its share, of sharded weights what it has written itself."""
    mine = {}
    for position, name in enumerate(names):
        shard = re.match(r"__(\d+)_", Path(name).name)
        if (int(shard[1]) if shard else position) % accelerator.num_processes == accelerator.process_index:
            digest = xxhash.xxh3_64()
            with open(folder / name, "rb", buffering=0) as stream:
                while piece := stream.read(8 << 20):
                    digest.update(piece)
            mine[name] = digest.hexdigest()
    return {name: checksum for part in gather_object([mine]) for name, checksum in part.items()}


def _others(checkpoint: Path) -> str:
    names = [path.name for path in checkpoints_in(checkpoint.parent).values() if path != checkpoint]
    if not names:
        return f"There is no other checkpoint in {checkpoint.parent}."
    return f"Go on from another with --resume_from_checkpoint {' or '.join(reversed(names))}."


def _contents(checkpoint: Path) -> dict:
    try:
        found = json.loads((checkpoint / CONTENTS).read_text())
        files = {name: (size, checksum) for name, (size, checksum) in found["files"].items()}
        # Checkpoints of before there were settings, options and base are whole without.
        settings, options = (dict(found.get(name, {})) for name in ("settings", "options"))
        trained, base = dict(found["trained"]), found.get("base")
        return {"files": files, "trained": trained, "settings": settings, "options": options, "base": base}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{checkpoint} is damaged, or none of these trainers' checkpoints: {CONTENTS} in it says what was saved, "
            f"but {error!r}. {_others(checkpoint)}"
        ) from None


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below the folder, by its path there."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def load_checkpoint(accelerator: Accelerator, model, optimizer, scheduler, checkpoint: Path, args) -> None:
    """Model, optimizer, schedule, loader and random numbers as they were saved; all options are those of `args`.

    Those that differ from the checkpoint's are said: another shift, say, goes on with another objective.

    Raises:
        UserError: it is one of another model, or of other trained weights of it, or of ones that mean something else,
            or a LoRA on another base.
    """
    contents = _contents(checkpoint)
    saved, mine = contents["trained"], _trained(model)
    differences = [
        f"{name} is {saved.get(name, 'not')} there and {mine.get(name, 'not trained')} here"
        for name in sorted(saved.keys() | mine.keys())
        if saved.get(name) != mine.get(name)
    ]
    if differences:
        raise UserError(
            f"{checkpoint} holds other weights than this run trains ({len(differences)} differ):\n  "
            + "\n  ".join(differences[:3])
            + "\nGive the model, --rank and --lora_target_modules of that run, or another --output_dir."
        )
    settings = _settings(args)
    for name, found in contents["settings"].items():
        if found != settings.get(name):
            raise UserError(
                f"{checkpoint} was trained with --{name} {found}, but this run has {settings.get(name)}, where its "
                f"weights mean something else. Give the --{name} of that run, or another --output_dir."
            )
    _check_base(accelerator, model, checkpoint, contents["base"], args)
    if accelerator.is_main_process:
        for name, value in _options(args).items():
            if (saved := contents["options"].get(name, value)) != value:
                print(f"--{name} {value} as given, not the checkpoint's {saved}", file=sys.stderr, flush=True)
    accelerator.load_state(str(checkpoint))
    _set_options(accelerator, optimizer, scheduler.scheduler, adam_options(args))


def _set_options(accelerator: Accelerator, optimizer, schedule, options: dict) -> None:
    """Replaces the checkpoint's learning rate and other options, which the optimizer and its schedule brought back."""
    found = {**optimizer.param_groups[0], "lr": schedule.base_lrs[0]}
    for name, value in options.items():
        if found[name] != value and accelerator.is_main_process:
            print(f"{name} {value} as given, not the checkpoint's {found[name]}", file=sys.stderr, flush=True)
    schedule.base_lrs = [options["lr"] for _ in schedule.base_lrs]
    for group, factor in zip(optimizer.param_groups, schedule.lr_lambdas, strict=True):
        group.update(options, initial_lr=options["lr"], lr=options["lr"] * factor(schedule.last_epoch))


def _trained(model) -> dict[str, list[int]]:
    """Names and sizes of all weights that are trained, as they are without any wrapper."""
    return {plain_name(name): list(weight.shape) for name, weight in model.named_parameters() if weight.requires_grad}


def _base(accelerator: Accelerator, model) -> dict | None:
    """What a LoRA is trained on, in which precision; None where all weights are in the checkpoint."""
    digest = unwrapped(accelerator, model).base_digest
    return digest and {"precision": accelerator.mixed_precision, "digest": digest}


def _check_base(accelerator: Accelerator, model, checkpoint: Path, saved: dict | None, args) -> None:
    """
    Raises:
        UserError: this run has loaded another base; in another precision its numbers differ anyway.
    """
    mine = _base(accelerator, model)
    if saved and mine and saved["precision"] == mine["precision"] and saved["digest"] != mine["digest"]:
        raise UserError(
            f"{checkpoint} holds a LoRA on other base weights (digest {saved['digest']}) than those of "
            f"{args.pretrained_model_name_or_path} (digest {mine['digest']}). Give the "
            "--pretrained_model_name_or_path and --revision of that run, or another --output_dir."
        )


def _settings(args) -> dict:
    """What else weights of these names and sizes are trained for; nothing in them would show another."""
    return {"expert": getattr(args, "expert", None), "lora_alpha": args.rank and (args.lora_alpha or args.rank)}


def _options(args) -> dict[str, str]:
    return {name: str(value) for name, value in vars(args).items() if name in _OBJECTIVE}


@contextlib.contextmanager
def named_if_not_written(what: str, folder: Path, output_dir: Path):
    """
    Raises:
        UserError: the block could not write, to a full disk say; with what is whole and the command that goes on.
    """
    try:
        yield
    except WRITE_ERRORS as error:
        if (problem := write_problem(error)) is None:
            raise
        free = shutil.disk_usage(output_dir).free / 2**30
        last = ", ".join(path.name for path in checkpoints_in(output_dir).values()) or "none"
        raise UserError(
            f"{what} could not be written to {folder}, where {free:.2f} GiB are free: {problem}\n"
            f"Whole checkpoints: {last}. Once there is room, go on with:\n{resume_command()}"
        ) from error


def save_checkpoint(accelerator: Accelerator, model, output_dir: Path, step: int, args) -> None:
    """Saves under a temporary name and renames, so that a save that is killed never becomes `latest`.

    Raises:
        UserError: it could not be written.
    """
    whole, partial = output_dir / f"checkpoint-{step}", output_dir / f"partial-checkpoint-{step}"
    if accelerator.is_main_process:
        for cut_short in output_dir.glob("partial-checkpoint-*"):
            shutil.rmtree(cut_short)
    accelerator.wait_for_everyone()
    with named_if_not_written(f"the checkpoint of step {step}", partial, output_dir):
        accelerator.save_state(str(partial))
        accelerator.wait_for_everyone()
        sizes = broadcast_object_list([_sizes(partial)])[0]  # all ranks must share out the same list
        checksums = _checksums(accelerator, partial, list(sizes))
        if accelerator.is_main_process:
            files = {name: [size, checksums[name]] for name, size in sizes.items()}
            contents = {"step": step, "files": files, "trained": _trained(model), "settings": _settings(args)}
            contents |= {"options": _options(args), "base": _base(accelerator, model)}
            (partial / CONTENTS).write_text(json.dumps(contents, indent=1))
    if accelerator.is_main_process:
        _retire_later(output_dir, step, args.checkpoints_total_limit)
        os.replace(partial, whole)
        present = checkpoints_in(output_dir)
        limit = args.checkpoints_total_limit
        for old in sorted(present)[: -limit if limit else 0]:
            _remove(present[old])
    accelerator.wait_for_everyone()


def _retire_later(output_dir: Path, step: int, limit: int | None) -> None:
    """Of a run that this one went on from further back: they would be `latest`, and rotation would spare them."""
    for other, checkpoint in checkpoints_in(output_dir).items():
        if other >= step:
            outdated = checkpoint.with_name(f"outdated-{checkpoint.name}")
            if outdated.exists():
                shutil.rmtree(outdated)
            _remove(checkpoint) if limit or other == step else os.replace(checkpoint, outdated)


def _remove(checkpoint: Path) -> None:
    """Under another name first: one that is half removed must not look like a checkpoint."""
    going = checkpoint.with_name(f"partial-{checkpoint.name}-removed")
    os.replace(checkpoint, going)
    shutil.rmtree(going)


def keep_metrics_until(path: Path, step: int) -> None:
    """Moves the lines of steps that are about to be done again to outdated-metrics.jsonl: each step has one line."""
    if not path.exists():
        return
    partial, outdated, later = path.with_suffix(".partial"), path.with_name(f"outdated-{path.name}"), []
    with open(path, errors="replace") as lines, open(partial, "w") as kept:
        for line in lines:
            kept.write(line) if _step_of(line) <= step else later.append(line)
    if later := [line for line in later if _step_of(line) < math.inf]:
        with open(outdated, "a") as file:
            file.writelines(later)
        print(f"moved {len(later)} lines of steps after {step} from {path} to {outdated}", file=sys.stderr, flush=True)
    os.replace(partial, path)


def _step_of(line: str) -> float:
    """Of a line of metrics.jsonl; infinity where it is damaged, cut short by a full disk say."""
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError, OverflowError):
        return math.inf
