"""What does a trained model's page on the Hub say, and how does it get there?"""

from pathlib import Path

from accelerate import Accelerator
from huggingface_hub import ModelCardData
from model_setup import load_index

from adaptiveload_hf.hub import is_hub_id, make_repository, push_folder

_USE = {
    True: """import torch
from diffusers import {pipeline}

pipe = {pipeline}.from_pretrained("{base}"{revision}, dtype=torch.bfloat16)
pipe.load_lora_weights("{repo}"{second})""",
    False: """import torch
from diffusers import {pipeline}, {model}

transformer = {model}.from_pretrained("{repo}", subfolder="{folder}", dtype=torch.bfloat16)
pipe = {pipeline}.from_pretrained("{base}"{revision}, {folder}=transformer, dtype=torch.bfloat16)""",
}


def add_hub_arguments(parser) -> None:
    """What happens to the result."""
    add = parser.add_argument
    add("--push_to_hub", action="store_true", help="upload the result and its card, never the checkpoints")
    add("--hub_model_id", help="user/repo (default: the name of --output_dir in your own namespace)")
    add("--hub_token", help="token for the Hub (default: that of `hf auth login`)")


def find_repository(accelerator: Accelerator, args) -> str | None:
    """The full id to push to, made before training, so that who may not write there does not find out after it.

    Only the main process knows it; None on others, and where nothing is pushed.

    Raises:
        UserError: not logged in, or with a token that may not write there.
    """
    if not (args.push_to_hub and accelerator.is_main_process):
        return None
    return make_repository(args.hub_model_id or Path(args.output_dir).resolve().name, token=args.hub_token)


def publish(args, repository: str | None, loader, model_class, folder: str, environment: dict) -> None:
    """Writes the card beside the saved result and pushes both; for the main process.

    Args:
        repository: from `find_repository`; None only writes the card.
        folder: where in the output_dir a whole transformer is.
        environment: from `describe_run`.

    Raises:
        UserError: it could not be pushed; everything is saved, and the message has the command for later.
    """
    output_dir = Path(args.output_dir)
    # Image-to-video has a pipeline of its own for the same transformer class.
    pipeline = load_index(args, "a pipeline")["_class_name"]
    names = {"pipeline": pipeline, "model": model_class.__name__, "folder": folder}
    # A public page never names a path of this machine.
    base = args.pretrained_model_name_or_path
    names |= {"base": base if is_hub_id(base) else "PIPELINE", "repo": repository or "user/repo"}
    names["revision"] = f', revision="{args.revision}"' if args.revision and is_hub_id(base) else ""
    names["second"] = ", load_into_transformer_2=True" if folder == "transformer_2" else ""
    clips = sorted((output_dir / "validation").glob(f"step-{loader.global_step}-*"))
    title = repository.split("/")[1] if repository else output_dir.resolve().name
    card = _card(args, loader, title, names, environment, [f"validation/{clip.name}" for clip in clips])
    (output_dir / "README.md").write_text(card, encoding="utf-8")
    if repository is not None:
        saved = f"{folder}/*" if args.rank is None else "pytorch_lora_weights.safetensors"
        files = ["README.md", saved, *(f"validation/{clip.name}" for clip in clips)]
        message = f"Trained for {loader.global_step} optimizer steps"
        print(push_folder(output_dir, files, repository, token=args.hub_token, commit_message=message))


def _card(args, loader, title: str, names: dict, environment: dict, clips: list[str]) -> str:
    base = args.pretrained_model_name_or_path
    lora = args.rank is not None
    data = ModelCardData(
        library_name="diffusers",
        base_model=base if is_hub_id(base) else None,
        tags=["adaptiveload", "diffusers", "diffusers-training", *(["lora"] if lora else [])],
    )
    what = f"LoRA of rank {args.rank} for" if lora else "All weights of"
    facts = {
        "optimizer steps": loader.global_step,
        "samples": sum(bucket.count for bucket in loader.plan.buckets),
        "learning rate": f"{args.learning_rate:g}, {args.lr_scheduler}",
        "timesteps": f"{args.weighting_scheme}",
        "balance, loss normalization": f"{loader.schedule.balance}, {args.loss_normalization}",
        "ranks x micro-steps": f"{loader.schedule.world_size} x {args.gradient_accumulation_steps}",
        "trained on": f"{environment['gpu'] or 'CPU'}, {environment['strategy']}, {environment['dtype']}",
    }
    rows = [f"| {bucket.shape} | {bucket.count} | {bucket.batch_size} |" for bucket in loader.plan.buckets]
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {title}",
        f"{what} {names['model']}, trained with `adaptiveload_hf`" + (f" from {base}." if is_hub_id(base) else "."),
        f"```python\n{_USE[lora].format(**names)}\n```",
        "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in facts.items()),
        "| latent shape | samples | batch size |\n|---|---|---|\n" + "\n".join(rows),
        *(f"[{clip}]({clip})" for clip in clips),
    ]
    return "\n\n".join(parts) + "\n"
