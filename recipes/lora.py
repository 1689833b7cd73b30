"""How does a run train a LoRA alone: adapter in float32, base as it is, and only the adapter in what is saved?"""

import argparse
import importlib.util
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers.training_utils import cast_training_params
from training_arguments import at_least
from wrapped_model import plain_name, unwrapped, whole_state_dict

from adaptiveload_hf import UserError


def add_lora_arguments(parser) -> None:
    """A LoRA instead of all weights.

    The default targets are the family's LORA_TARGET_MODULES.
    """
    add = parser.add_argument
    add("--rank", type=_rank, help="rank of the LoRA; without it the whole transformer is trained")
    add("--lora_alpha", type=at_least(0.0, above=True), help="alpha of the LoRA (default: the rank)")
    add("--lora_target_modules", nargs="+", metavar="NAME",
        help="ends of module names, such as to_q or ffn.net.2 (default: attention)")  # fmt: skip


def _rank(text: str) -> int:
    if importlib.util.find_spec("peft") is None:
        raise argparse.ArgumentTypeError("a LoRA needs PEFT. Install it: pip install peft")
    return at_least(1)(text)


_rank.__name__ = "int"  # of a word that is no number, argparse says: invalid int value


def add_lora(transformer, args) -> None:
    """Freezes the transformer and adds an adapter to it, in float32 whatever the base is in.

    Raises:
        UserError: a target that fits no linear module of this transformer.
    """
    from peft import LoraConfig  # here: who trains all weights needs no PEFT

    linear = [name for name, module in transformer.named_modules() if isinstance(module, torch.nn.Linear)]
    unknown = [
        target for target in args.lora_target_modules if not any(f".{name}".endswith(f".{target}") for name in linear)
    ]
    if unknown:
        ends = sorted({name.split(".", 2)[-1] for name in linear if name.count(".") > 1})
        raise UserError(
            f"--lora_target_modules {' '.join(unknown)} names no linear module of {type(transformer).__name__}. "
            f"Its blocks have {', '.join(ends)}."
        )
    transformer.requires_grad_(False)
    transformer.add_adapter(
        LoraConfig(r=args.rank, lora_alpha=args.lora_alpha or args.rank, target_modules=args.lora_target_modules)
    )
    cast_training_params(transformer, torch.float32)


def leave_frozen_out(model) -> None:
    """Keeps frozen parameters, and buffers such as SD3's table of positions, out of the model's state_dict.

    So checkpoints hold and restore the adapter alone.

    Args:
        model: from `unwrapped`, after `accelerator.prepare`, which reads the whole state_dict itself.
    """
    frozen = {plain_name(name) for name, parameter in model.named_parameters() if not parameter.requires_grad}
    frozen |= {plain_name(name) for name, _ in model.named_buffers()}

    def drop(module, state_dict, prefix, local_metadata):
        for key in [key for key in state_dict if plain_name(key.removeprefix(prefix)) in frozen]:
            del state_dict[key]

    def expect(module, incompatible):
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if plain_name(key) not in frozen]

    model.register_state_dict_post_hook(drop)
    model.register_load_state_dict_post_hook(expect)


def save_lora(accelerator: Accelerator, model, pipeline_class, folder: Path) -> None:
    """Saves the adapter as `pipeline.load_lora_weights(folder)` loads it."""
    state_dict = whole_state_dict(accelerator, model)
    if accelerator.is_main_process:
        # peft's own function finds nothing in blocks that activation checkpointing has wrapped, and says nothing.
        layers = {name.replace(".default.", "."): value.cpu() for name, value in state_dict.items() if "lora_" in name}
        pipeline_class.save_lora_weights(
            folder,
            transformer_lora_layers=layers,
            transformer_lora_adapter_metadata=unwrapped(accelerator, model).peft_config["default"].to_dict(),
        )
        print(f"the trained LoRA is {folder}/pytorch_lora_weights.safetensors", file=sys.stderr, flush=True)
