"""Runs a trainer in this process, or as the ranks of a world under FSDP2 (see support.worlds)."""

import importlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

from support.accelerators import FSDP2, fresh_accelerate
from support.worlds import on_ranks

RECIPES = Path(__file__).parents[2] / "recipes"
COUNTS = {"1x4x4": 17, "1x4x8": 9, "2x4x8": 8, "5x4x8": 14}
TIMES = {
    *("seconds", "samples_per_second", "tokens_per_second", "data_wait_seconds", "achieved_efficiency"),
    *("measured_balance_efficiency", "peak_reserved_gib", "findings"),
}


def arguments(setup, output_dir, *extra, preflight=False, **changed) -> list[str]:
    """The command line of a run; `changed` replaces a value or, with None, leaves it out; `extra` is appended.

    setup: has pipeline, dataset and config.
    """
    extra = extra if preflight else (*extra, "--no_preflight")
    values = {
        "pretrained_model_name_or_path": setup.pipeline,
        "dataset": setup.dataset,
        "bucket_config": setup.config,
        "output_dir": output_dir,
        "gradient_accumulation_steps": 2,
        "max_train_steps": 8,
        "checkpointing_steps": 4,
        "learning_rate": 1e-3,
        "report_to": "none",
        **changed,
    }
    given = {f"--{name}": value for name, value in values.items() if value is not None}
    return [str(word) for option in given.items() for word in option] + list(map(str, extra))


def train_here(setup, output_dir, *extra, recipe="train_wan", **changed) -> list[dict]:
    """The whole recipe in this process, on one rank; its metrics."""
    before = sys.argv
    sys.argv = [f"{recipe}.py", *arguments(setup, output_dir, *extra, **changed)]
    try:
        with fresh_accelerate(ACCELERATE_USE_CPU="true"):
            importlib.import_module(recipe).main()
    finally:
        sys.argv = before
    return metrics_of(output_dir)


def train_on_ranks(
    world_size: int,
    words: list[str],
    *,
    recipe="train_wan",
    kill_at: int = 0,
    terminate_at: int = 0,
    **environment: str,
) -> None:
    """The whole recipe on `world_size` ranks with this command line.

    kill_at, terminate_at: the micro-step, from 1, at which the last rank gets SIGKILL or SIGTERM.
    environment: of the ranks; ERRORS is a folder in which each rank writes why it ends, as under a launcher, and
        OWN_WORD the word that each extends by its rank: its own folder, as on machines without shared storage.
    """
    signals = {kill_at: signal.SIGKILL, terminate_at: signal.SIGTERM}
    moments = [[step, number] for step, number in signals.items() if step]
    on_ranks(world_size, _run_rank, recipe, words, moments, timeout=240, **{**FSDP2, **environment})


def work_alone() -> str:
    """The main process's result on every rank, though it takes longer than the ranks' collectives may; likewise in
    processes that the launcher starts again, with the same store."""
    sys.path.insert(0, str(RECIPES))
    import shared_work
    from accelerate import Accelerator
    from torch.distributed.distributed_c10d import _set_pg_timeout

    accelerator = Accelerator()
    accelerator.wait_for_everyone()
    _set_pg_timeout(timedelta(seconds=0.5))

    def work():
        time.sleep(1)
        return f"made on rank {accelerator.process_index}"

    shared_work.on_main(accelerator, work)
    return importlib.reload(shared_work).on_main(accelerator, work)


def look_through_own(folder: str) -> str:
    """What preparing a.png says where each rank has a folder of its own."""
    sys.path.insert(0, str(RECIPES))
    from accelerate import Accelerator
    from data_folder import Listing
    from sample_plan import look_through

    from adaptiveload_hf import UserError

    accelerator = Accelerator()
    try:
        look_through(accelerator, Path(f"{folder}{accelerator.process_index}"), Listing({"a.png": ""}), 16, 1, None)
    except UserError as error:
        return str(error)


def difference_of_arguments(words: list[str]) -> str | None:
    """What a trainer says to the arguments, of which each rank has its own; None: they go together."""
    sys.path.insert(0, str(RECIPES))
    from accelerate import Accelerator
    from support.recipe_arguments import parse
    from training_arguments import compare_arguments

    from adaptiveload_hf import UserError

    try:
        compare_arguments(parse("P", *words[Accelerator().process_index].split()))
    except UserError as error:
        return str(error)


def held_out_loss(folder: str, text_tokens: int = 0) -> float:
    """The validation loss of the samples in a folder where each sample's loss is its index.

    text_tokens: that join the attention.
    """
    sys.path.insert(0, str(RECIPES))
    from accelerate import Accelerator
    from flow_matching import FlowMatching
    from validation import make_held_out_loss

    from adaptiveload_hf import TokenGeometry, load_prepared

    bucket = SimpleNamespace(shape="1x4x4", batch_size=2)
    loader = SimpleNamespace(plan=SimpleNamespace(buckets=[bucket]))
    flow = FlowMatching(1.0, "none", 0.0, 1.0, 1.0, seed=0)

    def losses(flow, batch):
        return batch["sample_index"].float()

    dataset, geometry = load_prepared(folder), TokenGeometry((1, 2, 2), text_tokens)
    return make_held_out_loss(Accelerator(), dataset, loader, geometry, flow, losses)(1)["validation_loss"]


def metrics_of(run) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def timeless(metrics: list[dict]) -> list[dict]:
    return [{name: value for name, value in line.items() if name not in TIMES} for line in metrics]


def save_small_transformer(folder, **changed) -> None:
    """A Wan transformer of two narrow layers; `changed` are further arguments of its configuration."""
    import torch
    from diffusers import WanTransformer3DModel

    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "num_layers": 2, "freq_dim": 16}
    channels = {"in_channels": 16, "out_channels": 16, "text_dim": 32, "rope_max_seq_len": 64}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        WanTransformer3DModel(**{**sizes, **channels, **changed}).save_pretrained(folder)


def _run_rank(recipe: str, words: list[str], moments: list) -> None:
    sys.path.insert(0, str(RECIPES))
    trainer = importlib.import_module(recipe)
    if "ERRORS" in os.environ:
        os.environ["TORCHELASTIC_ERROR_FILE"] = os.path.join(os.environ["ERRORS"], os.environ["RANK"])
    if "OWN_WORD" in os.environ:
        words = [word + os.environ["RANK"] if word == os.environ["OWN_WORD"] else word for word in words]
    if moments and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        trainer.run_micro_step = _interrupted(trainer.run_micro_step, dict(moments))
    sys.argv = [f"{recipe}.py", *words]
    trainer.main()


def _interrupted(run_micro_step, moments: dict[int, int]):
    done = []

    def run(*arguments):
        done.append(None)
        if len(done) in moments:
            os.kill(os.getpid(), moments[len(done)])
        return run_micro_step(*arguments)

    return run
