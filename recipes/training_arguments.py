"""Which flags do the trainers and the shape benchmark share? Named as in diffusers' own training scripts."""

import argparse
import math

from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType
from diffusers.optimization import SchedulerType

from adaptiveload_hf import LatentShape, UserError
from adaptiveload_hf.buckets.ranks import compare_ranks


class _Help(argparse.RawDescriptionHelpFormatter):
    """Every default, and one letter for a number."""

    def _get_help_string(self, action):
        plain = isinstance(action.default, (int, float, str)) and not isinstance(action.default, bool)
        return f"{action.help} (default: %(default)s)" if plain and action.option_strings[0] != "-h" else action.help

    def _get_default_metavar_for_optional(self, action):
        return "N" if getattr(action.type, "__name__", "") in ("int", "float") else "..."


def make_parser(description: str, *sections) -> argparse.ArgumentParser:
    """A parser of all the sections' arguments; a section's title is what its function says that it is about."""
    usage = "%(prog)s --pretrained_model_name_or_path ... --dataset ... --bucket_config ... --output_dir ... [options]"
    # A flag cut short would be another word to `resume_command`, which would print the token after --hub_tok.
    parser = argparse.ArgumentParser(description=description, formatter_class=_Help, usage=usage, allow_abbrev=False)
    for add_arguments in sections:
        add_arguments(parser.add_argument_group(add_arguments.__doc__.split(".")[0]))
    return parser


def at_least(low: float, *, above: bool = False, below: float = math.inf):
    """An argument's type: a finite number from `low` on, or above it, and less than `below`; whole where `low` is."""
    kind = type(low)

    def parse(word: str):
        number = kind(word)
        if not (math.isfinite(number) and (number > low if above else number >= low) and number < below):
            words = f"{'more than' if above else 'at least'} {low}" + ("" if below == math.inf else f", below {below}")
            raise argparse.ArgumentTypeError(f"must be {words}, but it is {word}")
        return number

    parse.__name__ = kind.__name__  # of a word that is no number, argparse says: invalid float value
    return parse


def shape(word: str) -> LatentShape:
    """An argument's type: FxHxW."""
    try:
        return LatentShape.parse(word)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check_arguments(args, lora_target_modules: list[str]) -> None:
    """What argparse cannot see. A collective.

    Args:
        lora_target_modules: the family's, which are the default.

    Raises:
        UserError: a tracker that is not installed, which accelerate would leave out without a word; an option that
            does nothing without another, such as an alpha without a rank, with which all weights would be trained; or
            ranks that were started with other arguments, and would wait for each other at a save or at the end.
    """
    for name, default in {"lora_alpha": None, "lora_target_modules": lora_target_modules}.items():
        if args.rank is None and getattr(args, name) != default:
            raise UserError(
                f"--{name} is for a LoRA, but without --rank all weights are trained. Add --rank, or leave it out."
            )
    if args.lr_warmup_steps and args.lr_scheduler == "constant":
        raise UserError(
            f"--lr_scheduler constant has no warm-up, but --lr_warmup_steps is {args.lr_warmup_steps}. Pass "
            "--lr_scheduler constant_with_warmup, or another, or leave --lr_warmup_steps out."
        )
    if args.hub_model_id and not args.push_to_hub:
        raise UserError(
            f"--hub_model_id {args.hub_model_id} says where to, but nothing is uploaded without --push_to_hub."
        )
    trackers = [str(tracker) for tracker in get_available_trackers()]
    if args.report_to not in ("none", "all", *trackers):
        raise UserError(
            f"--report_to {args.report_to}: it is not installed; here are {', '.join(trackers) or 'no trackers'}. "
            f"`pip install {args.report_to}`, or choose another or none (metrics.jsonl is written always)."
        )
    compare_arguments(args)


def compare_arguments(args) -> None:
    """Refuses ranks that were started with other arguments, and would wait for each other somewhere. A collective.

    Raises:
        UserError: naming the argument and both values.
    """
    # A machine may have its own copies of these; what is in them is compared where it counts.
    own = {"pretrained_model_name_or_path", "dataset", "validation_dataset", "bucket_config", "output_dir"}
    own |= {"config", "shapes"}  # of benchmark_shapes.py
    given = {name: "given" for name in own & vars(args).keys() if getattr(args, name) not in (None, "auto")}
    found = {**vars(args), **given, "hub_token": None}  # which the main process alone needs, and nobody should read
    compare_ranks({f"--{name}": value for name, value in found.items()})


def add_model_arguments(parser, required: bool = True) -> None:
    """Which model, which data, and the step's own options.

    required: nothing else can stand for model and data.
    """
    add = parser.add_argument
    add("--pretrained_model_name_or_path", required=required, help="the pipeline: folder or Hub id")
    add("--revision", help="branch, tag or commit of the Hub id")
    add("--from_scratch", action="store_true", help="random weights in the pipeline's transformer configuration")
    add("--dataset", required=required, help="output_dir of prepare_dataset.py")
    add("--output_dir", required=True, help="folder for checkpoints, metrics.jsonl and the result")
    add(
        "--seed",
        type=at_least(0, below=2**32),
        default=0,
        help="for the data's order, noise, timesteps and a LoRA's weights",
    )
    add("--gradient_accumulation_steps", type=at_least(1), default=1, help="K: micro-steps per optimizer step")
    add("--mixed_precision", choices=["no", "bf16", "fp16"], help="default: the launch configuration's")
    add(
        "--gradient_checkpointing",
        action="store_true",
        help="recompute activations; FSDP has a setting of its own for it",
    )
    add("--no_patch", action="store_true", help="do not fuse the model with patch_model")
    add("--memory_limit_gib", type=at_least(0.0, above=True), help="limit per GPU (default: 90%%; none on CPU)")
    add("--learning_rate", type=at_least(0.0), default=1e-5, help="peak learning rate of AdamW")
    add("--adam_beta1", type=at_least(0.0, below=1.0), default=0.9, help="decay of AdamW's running mean of gradients")
    add(
        "--adam_beta2",
        type=at_least(0.0, below=1.0),
        default=0.999,
        help="decay of AdamW's running mean of squared gradients",
    )
    add("--adam_weight_decay", type=at_least(0.0), default=1e-2, help="per step, times the learning rate")
    add("--adam_epsilon", type=at_least(0.0), default=1e-8, help="added to AdamW's divisor")
    add("--max_grad_norm", type=at_least(0.0, above=True), default=1.0, help="gradients are clipped to this norm")


def adam_options(args) -> dict:
    """AdamW's options, of `add_model_arguments`."""
    return {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "weight_decay": args.adam_weight_decay,
        "eps": args.adam_epsilon,
    }


def add_flow_arguments(parser) -> None:
    """How timesteps are drawn and weighed."""
    add = parser.add_argument
    schemes = ["sigma_sqrt", "logit_normal", "mode", "cosmap", "none"]
    add("--weighting_scheme", choices=schemes, default="logit_normal", help="none: uniform timesteps, equal weights")
    add("--logit_mean", type=float, default=0.0, help="mean of logit_normal; above 0 means less noise")
    add("--logit_std", type=at_least(0.0), default=1.0, help="standard deviation of logit_normal")
    add("--mode_scale", type=float, default=1.29, help="scale of mode")
    add("--shift", type=at_least(0.0, above=True), help="shift of sigma (default: that of the pipeline's scheduler)")
    add("--shift_shape", type=shape, metavar="FxHxW",
        help="latent shape that --shift is meant for: others get shift * sqrt(their size / its size)")  # fmt: skip


def add_scheduler_arguments(parser) -> None:
    """The learning rate over the run."""
    add = parser.add_argument
    add("--lr_scheduler", choices=[kind.value for kind in SchedulerType if kind.value != "piecewise_constant"],
        default="constant", help="diffusers' schedules")  # fmt: skip
    add("--lr_warmup_steps", type=at_least(0), default=0, help="optimizer steps of warm-up; not for constant")
    add("--lr_num_cycles", type=at_least(1), default=1, help="cycles of cosine_with_restarts")
    add("--lr_power", type=at_least(0.0), default=1.0, help="power of polynomial")


def add_run_arguments(parser) -> None:
    """How long to train, in which order, and what to write."""
    add = parser.add_argument
    add("--bucket_config", required=True,
        help="folder that benchmark_shapes.py wrote, a Hub id, or auto: measure on the first start")  # fmt: skip
    add(
        "--no_preflight",
        action="store_true",
        help="start without trying the largest bucket, a checkpoint and the other buckets",
    )
    add("--batch_sizes", nargs="+", metavar="SHAPE=B", help="batch sizes that replace the plan's, such as 21x60x104=1")
    add("--repeats", nargs="+", metavar="PATTERN=N",
        help="how often an epoch has each file, such as 'photos/*=0.5'; the last matching pattern counts")  # fmt: skip
    add("--num_train_epochs", type=at_least(1), default=1, help="epochs to train")
    add("--max_train_steps", type=at_least(1), help="total optimizer steps; overrides --num_train_epochs")
    add("--balance", default="auto", help="how ranks are balanced: none, step, stratified:n, window:n or auto")
    add(
        "--loss_normalization",
        choices=["token", "sample", "none"],
        default="token",
        help="what weighs the same in the loss",
    )
    add("--allow_extrapolation", action="store_true", help="accept shapes outside the measured range of tokens")
    add("--dataloader_num_workers", type=at_least(0), default=0, help="processes per rank that read samples")
    add("--checkpointing_steps", type=at_least(1), default=500, help="optimizer steps between checkpoints")
    add("--checkpoints_total_limit", type=at_least(1), help="keep only this many, the newest")
    add("--resume_from_checkpoint", help="'latest', or a checkpoint-<step> folder")
    add("--on_dataset_change", choices=["error", "new_epoch"], default="error",
        help="when resuming on another dataset: refuse, or begin a new epoch of it and keep the step")  # fmt: skip
    add("--max_skipped_steps", type=at_least(1), default=10,
        help="end the run after this many skipped steps, whose gradient was not finite")  # fmt: skip
    add(
        "--proportion_empty_prompts",
        type=at_least(0.0),
        default=0.0,
        help="share of samples trained without their caption",
    )
    add("--report_to", choices=["none", *LoggerType.list()], default="tensorboard", help="a tracker of accelerate")
    add("--logging_dir", default="logs", help="the tracker's folder inside --output_dir")


def add_validation_arguments(parser) -> None:
    """What to look at while training; none of it moves the training's random numbers."""
    add = parser.add_argument
    add("--validation_dataset", help="prepared held-out samples, to report their loss per shape")
    add("--validation_prompt", nargs="+", help="captions to sample clips or pictures from")
    add(
        "--validation_steps",
        type=at_least(1),
        default=500,
        help="optimizer steps between validations; there is one at the end too",
    )
    add("--validation_resolution", type=shape, metavar="FxHxW",
        help="size of the samples in frames and pixels (default: the largest bucket's)")  # fmt: skip
    add("--validation_inference_steps", type=at_least(1), default=30, help="denoising steps of a sample")
    add("--guidance_scale", type=float, default=5.0, help="guidance scale of the samples")
