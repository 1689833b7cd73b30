"""How is one model trained on random latents of any shape, now on these kernels and now on those?"""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
import wan_training
from accelerate.utils import set_seed
from benchmark_shapes import use_config_alone
from flow_matching import make_flow_matching
from inductor_options import correct_options
from lora import add_lora_arguments
from model_setup import describe_run, load_model_config, load_transformer, prepare_training
from random_batches import column_sizes, make_random_batches
from training_arguments import add_flow_arguments, add_model_arguments
from training_loop import run_micro_step

from adaptiveload_hf import LatentShape, patch_model, unpatch_model
from adaptiveload_hf.device_memory import empty_device_cache, reset_peak_memory

KERNELS = ("eager", "patched", "compiled", "patched_compiled")


def add_training_arguments(parser) -> None:
    """Which model, of random weights, and the step's own options."""
    add_model_arguments(parser, required=False)
    add_lora_arguments(parser)
    add_flow_arguments(parser)
    parser.add_argument("--config", required=True, help="a Wan transformer's config.json; the weights are random")
    parser.add_argument("--num_layers", type=int, help="instead of the configuration's")
    parser.set_defaults(no_patch=True, lora_target_modules=wan_training.LORA_TARGET_MODULES)


def alike(block, inputs: tuple) -> tuple:
    """A block's tensors, always contiguous views.

    FSDP2 hands out views in forward but not when a checkpoint runs a block again, and the first are transposed:
    torch.compile would make a graph for each, of half a minute.
    """
    return tuple(each.contiguous().view_as(each) if isinstance(each, torch.Tensor) else each for each in inputs)


class RandomTraining:
    """A sharded Wan and its optimizer.

    Args:
        accelerator: from `make_accelerator`.
        args: of `add_training_arguments`.
    """

    def __init__(self, accelerator, args):
        set_seed(args.seed)  # the same on all ranks: FSDP2 shards what each rank holds and broadcasts nothing
        self.accelerator, self.args, self._planned = accelerator, args, set()
        folder = Path(args.output_dir)
        if args.num_layers is not None:
            config = json.loads(Path(args.config).read_text()) | {"num_layers": args.num_layers}
            args.config = folder / "config.json"
            if accelerator.is_main_process:
                args.config.write_text(json.dumps(config))
        use_config_alone(accelerator, args, folder / "pipeline")
        self.config = load_model_config(wan_training.MODEL_CLASS, args)
        with accelerator.device:  # random weights are made fastest where they are to be
            transformer = load_transformer(accelerator, wan_training.MODEL_CLASS, args)
        self.model, self.optimizer, self.scheduler = prepare_training(accelerator, args, transformer)
        self.flow = make_flow_matching(args)
        self.predict = wan_training.make_predict(accelerator, self.model, wan_training.WanVariant())
        self.random_batch = make_random_batches(column_sizes(None, self.config), accelerator.device)
        model, environment = describe_run(accelerator, args, wan_training.MODEL_CLASS, self.config)
        del environment["patched"]  # now so, now so
        self.environment = {"class": model["class"], "num_layers": self.config["num_layers"], **environment}

    def micro_step(self, shape: LatentShape, samples: torch.Tensor, loss_weight: float = 1.0) -> None:
        """Forward and backward; every K-th also the optimizer. samples: int64 [B], they decide the noise."""
        batch = self.random_batch(shape, len(samples)) | {"sample_index": samples, "loss_weight": loss_weight}
        parts = (self.accelerator, self.model, self.optimizer, self.scheduler)
        run_micro_step(*parts, self._losses, batch, self.args.max_grad_norm)

    def _losses(self, batch: dict) -> torch.Tensor:
        return self.flow.sample_losses(self.predict, batch, 0)

    @contextmanager
    def kernels(self, name: str):
        """The blocks run on these (one of KERNELS) inside the `with`."""
        blocks = [module for module in self.model.modules() if "WanTransformerBlock" in type(module).__name__]
        patched, compiled = "patched" in name, "compiled" in name
        if patched:
            report = patch_model(self.model)
            if self.accelerator.is_main_process:
                print(report, file=sys.stderr)
        if compiled:
            # Each block by itself, as diffusers' compile_repeated_blocks does, but inside FSDP's hooks and the
            # checkpoint, which would break its graph. Dynamic from the start: a graph a shape would take minutes.
            uncompiled = [block.__dict__.get("forward") for block in blocks]  # a patched one's own
            for block in blocks:
                block.forward = torch.compile(block.forward, dynamic=True, options=correct_options())
            hooks = [block.register_forward_pre_hook(alike) for block in blocks]
        yield
        if compiled:
            for hook, block, forward in zip(hooks, blocks, uncompiled):
                hook.remove()
                del block.forward
                if forward is not None:
                    block.forward = forward
        if patched:
            unpatch_model(self.model)

    def warm_up(self, name: str, sizes: list[tuple[LatentShape, int]]) -> None:
        """What happens once in a run of days: attention's plans, and graphs. Peak memory is counted from here on.

        Attention makes a plan at the first call of a size, torch.compile may make a graph. One block does for all.
        The largest comes first, since Inductor chooses its kernels for the size that it sees.

        Args:
            name: of the kernels in use.
            sizes: every (shape, B) that will come, the smallest first.
        """
        if not self._planned:
            self.whole_step(*sizes[0])  # FSDP2 looks for its blocks at the first call
        with self._one_block():
            for shape, size in reversed(sizes):
                if "compiled" in name or (shape, size) not in self._planned:
                    self.whole_step(shape, size)
        self.whole_step(*sizes[0])  # the other blocks' first call on these kernels
        self._planned.update(sizes)
        empty_device_cache(self.accelerator.device)
        reset_peak_memory(self.accelerator.device)

    @contextmanager
    def _one_block(self):
        """The model ends after its first block inside the `with`."""
        model = self.accelerator.unwrap_model(self.model)
        blocks = model.blocks
        model.blocks = blocks[:1]
        yield
        model.blocks = blocks

    def whole_step(self, shape: LatentShape, size: int) -> None:
        """K micro-steps with the same micro-batch size on all ranks, and the optimizer."""
        for _ in range(self.accelerator.gradient_accumulation_steps):
            self.micro_step(shape, torch.arange(size))
