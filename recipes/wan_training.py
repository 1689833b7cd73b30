"""What do timing and training a Wan transformer have in common? The model, its optimizer and one micro-step."""

import hashlib
import inspect
import json
import sys
import warnings
from dataclasses import dataclass

import pyarrow.compute
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from diffusers.optimization import SchedulerType, get_scheduler
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

from adaptiveload_hf import UserError, patch_model
from adaptiveload_hf.config import current_environment
from adaptiveload_hf.distributed import model_input_dtype, strategy_of


def add_model_arguments(parser) -> None:
    """Which model, which data, and the step's own options; named as in diffusers' training scripts."""
    add = parser.add_argument
    add("--pretrained_model_name_or_path", required=True, help="Wan pipeline: folder or Hub id")
    add("--revision", help="revision of the Hub id")
    add("--from_scratch", action="store_true", help="random weights in the pipeline's transformer configuration")
    add("--dataset", required=True, help="output_dir of prepare_dataset.py")
    add("--output_dir", required=True)
    add("--seed", type=int, default=0)
    add("--gradient_accumulation_steps", type=int, default=1, help="K: micro-steps in an optimizer step")
    add("--mixed_precision", choices=["no", "bf16", "fp16"], help="default: the launch configuration's")
    add("--gradient_checkpointing", action="store_true", help="not together with fsdp_activation_checkpointing")
    add("--no_patch", action="store_true", help="leave the AdaLN operations eager")
    add("--memory_limit_gib", type=float, help="default: 90%% of the GPU's memory; none on CPU")
    add("--learning_rate", type=float, default=1e-5)
    add("--adam_beta1", type=float, default=0.9)
    add("--adam_beta2", type=float, default=0.999)
    add("--adam_weight_decay", type=float, default=1e-2)
    add("--adam_epsilon", type=float, default=1e-8)
    add("--max_grad_norm", type=float, default=1.0)


def add_flow_arguments(parser) -> None:
    """How timesteps are drawn and weighed."""
    add = parser.add_argument
    schemes = ["sigma_sqrt", "logit_normal", "mode", "cosmap", "none"]
    add("--weighting_scheme", choices=schemes, default="logit_normal", help="none: uniform timesteps, equal weights")
    add("--logit_mean", type=float, default=0.0)
    add("--logit_std", type=float, default=1.0)
    add("--mode_scale", type=float, default=1.29)
    add("--shift", type=float, help="of sigma; default: the pipeline's scheduler's")


def add_scheduler_arguments(parser) -> None:
    """The learning rate over the run."""
    add = parser.add_argument
    add("--lr_scheduler", choices=[kind.value for kind in SchedulerType if kind.value != "piecewise_constant"],
        default="constant")  # fmt: skip
    add("--lr_warmup_steps", type=int, default=0)
    add("--lr_num_cycles", type=int, default=1)
    add("--lr_power", type=float, default=1.0)


@dataclass(frozen=True)
class FlowMatching:
    """The flow-matching loss, with noise and timestep that depend on nothing but (seed, epoch, sample).

    x_sigma = (1 - sigma) * latent + sigma * noise, target = noise - latent, timestep = 1000 * sigma, with
    sigma = shift * (1 - u) / (1 + (shift - 1) * (1 - u)) and u drawn as in diffusers' scripts.
    Runs with another schedule, number of ranks or accumulation see each sample with the same noise, and no two
    samples share it.

    Source: Esser et al., Scaling Rectified Flow Transformers (SD3), section 3; diffusers' train_dreambooth_sd3.py,
    except that sigma is continuous instead of one of 1000 steps.
    """

    shift: float
    weighting_scheme: str
    logit_mean: float
    logit_std: float
    mode_scale: float
    seed: int

    def draw(self, latent: torch.Tensor, epoch: int, sample_index: torch.Tensor):
        """Noise and sigma of a micro-batch.

        Args:
            latent: [B, C, F, H, W]; only its shape and device count.
            epoch: of the schedule.
            sample_index: int64 [B].

        Returns:
            noise, float32 [B, C, F, H, W], and sigma, float32 [B, 1, 1, 1, 1], in (0, 1].
        """
        generator = torch.Generator(latent.device)
        noises, draws = [], []
        for sample in sample_index.tolist():
            key = hashlib.blake2b(f"{self.seed}/{epoch}/{sample}".encode(), digest_size=8).digest()
            generator.manual_seed(int.from_bytes(key, "little"))
            noises.append(torch.randn(latent.shape[1:], device=latent.device, generator=generator))
            draws.append(
                compute_density_for_timestep_sampling(
                    self.weighting_scheme,
                    1,
                    logit_mean=self.logit_mean,
                    logit_std=self.logit_std,
                    mode_scale=self.mode_scale,
                    device=latent.device,
                    generator=generator,
                )
            )
        # diffusers' scripts look u up in timesteps that fall from 1000 to 1, so its sigma is 1 - u.
        sigma = 1 - torch.cat(draws)
        sigma = self.shift * sigma / (1 + (self.shift - 1) * sigma)
        return torch.stack(noises), sigma.view(-1, 1, 1, 1, 1)

    def sample_losses(self, model, batch: dict, epoch: int, dtype: torch.dtype) -> torch.Tensor:
        """Loss of each sample of a micro-batch, float32 [B].

        Args:
            model: the (prepared) transformer.
            batch: `latent` [B, C, F, H, W] normalised, `prompt_embeds` [B, L, E], `sample_index` int64 [B].
            epoch: of the schedule.
            dtype: of the model's hidden states; the timestep stays float32, for bf16 would turn 997.3 into 996.
        """
        latent = batch["latent"].float()
        noise, sigma = self.draw(latent, epoch, batch["sample_index"])
        prediction = model(
            hidden_states=((1 - sigma) * latent + sigma * noise).to(dtype),
            timestep=1000 * sigma.flatten(),
            encoder_hidden_states=batch["prompt_embeds"].to(dtype),
            return_dict=False,
        )[0]
        error = (prediction.float() - (noise - latent)).square().flatten(1).mean(1)
        return compute_loss_weighting_for_sd3(self.weighting_scheme, sigma.flatten()) * error

    def loss(self, model, batch: dict, epoch: int, dtype: torch.dtype) -> torch.Tensor:
        """Mean of `sample_losses`, the loss of a micro-batch."""
        return self.sample_losses(model, batch, epoch, dtype).mean()


def make_flow_matching(args) -> FlowMatching:
    """From the arguments; the shift is the pipeline's scheduler's unless given."""
    shift = args.shift
    if shift is None:
        config = _load_part(FlowMatchEulerDiscreteScheduler, args, "scheduler")
        shift = config.get("flow_shift", config.get("shift"))
        if shift is None:
            raise UserError(
                f"the scheduler of {args.pretrained_model_name_or_path} has neither `shift` nor `flow_shift`. "
                "Pass --shift (Wan uses 3.0 for 480p and 5.0 for 720p)."
            )
    return FlowMatching(shift, args.weighting_scheme, args.logit_mean, args.logit_std, args.mode_scale, args.seed)


def load_transformer_config(args) -> dict:
    """The transformer's configuration, defaults filled in; cheap, so that mistakes show before weights are read."""
    config = _load_part(WanTransformer3DModel, args, "transformer")
    parameters = inspect.signature(WanTransformer3DModel.__init__).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    return {**defaults, **{name: value for name, value in config.items() if name in defaults}}


def check_dataset(dataset, transformer_config: dict) -> None:
    """Refuses latents or captions of another width than the transformer's.

    Raises:
        UserError: naming both widths.
    """
    row = dataset.select_columns(["latent_shape", "prompt_embeds_shape"])[0]
    for found, name, what in (
        (row["latent_shape"][0], "in_channels", "latents"),
        (row["prompt_embeds_shape"][-1], "text_dim", "caption embeddings"),
    ):
        if found != transformer_config[name]:
            raise UserError(
                f"the transformer takes {what} of width {transformer_config[name]} ({name}), but the dataset holds "
                f"width {found}. Prepare the dataset with this pipeline, or train the text-to-video transformer."
            )


def latent_statistics(args, dataset) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Mean and std, [C, 1, 1, 1] each, to normalise latents with; None where the dataset holds normalised ones.

    Raises:
        UserError: some latents are not normalised and the pipeline has no VAE configuration to do it with.
    """
    normalized = dataset.select_columns(["latent_normalized"]).with_format("arrow")[:]["latent_normalized"]
    if pyarrow.compute.all(normalized).as_py():
        return None
    config = _load_part(AutoencoderKLWan, args, "vae")
    if "latents_mean" not in config or "latents_std" not in config:
        raise UserError(
            "the dataset holds latents that are not normalised, and the VAE configuration has no latents_mean and "
            "latents_std. Prepare the dataset again with recipes/prepare_dataset.py, which stores normalised ones."
        )
    return tuple(torch.tensor(config[name]).view(-1, 1, 1, 1) for name in ("latents_mean", "latents_std"))


def prepare_training(accelerator: Accelerator, args, num_training_steps: int | None = None):
    """The patched transformer, AdamW and the learning rate's scheduler, sharded as the launch configuration says.

    Args:
        accelerator: from `make_accelerator`.
        args: of `add_model_arguments`; with a scheduler, also of `add_scheduler_arguments`.
        num_training_steps: optimizer steps in the whole run; None keeps the learning rate constant.

    Returns:
        model, optimizer, scheduler; the scheduler is stepped once an optimizer step.
    """
    _refuse_unsafe_sharding(accelerator, args.gradient_checkpointing)
    # Only in-place edits of the model's output would be wrong; FlowMatching.loss makes none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if args.from_scratch:
        transformer = WanTransformer3DModel.from_config(load_transformer_config(args))
    else:
        transformer = WanTransformer3DModel.from_pretrained(
            args.pretrained_model_name_or_path,
            subfolder="transformer",
            revision=args.revision,
            torch_dtype=torch.float32,  # master weights; half precision is the policy's or autocast's business
        )
    transformer.train().requires_grad_(True)
    if args.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    if not args.no_patch:
        report = patch_model(transformer)
        if accelerator.is_main_process:
            print(report, file=sys.stderr)
    optimizer = torch.optim.AdamW(
        transformer.parameters(),
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        weight_decay=args.adam_weight_decay,
        eps=args.adam_epsilon,
    )
    scheduler = get_scheduler("constant", optimizer)
    if num_training_steps is not None:
        scheduler = get_scheduler(
            args.lr_scheduler,
            optimizer,
            num_warmup_steps=args.lr_warmup_steps,
            num_training_steps=num_training_steps,
            num_cycles=args.lr_num_cycles,
            power=args.lr_power,
        )
    return accelerator.prepare(transformer, optimizer, scheduler)


def run_micro_step(accelerator, model, optimizer, scheduler, flow: FlowMatching, batch: dict, epoch, max_grad_norm):
    """Forward and backward of one micro-batch; every K-th call also clips and steps.

    Args:
        batch: as in `FlowMatching.loss`, and `loss_weight`, the float that makes averaging over ranks and
            micro-steps exact.

    Returns:
        The weighted loss, a scalar tensor whose mean over the W*K micro-batches is the optimizer step's loss, and
        the gradient's norm before clipping (None between optimizer steps).
    """
    grad_norm = None
    with accelerator.accumulate(model):
        loss = flow.loss(model, batch, epoch, model_input_dtype(accelerator)) * batch["loss_weight"]
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        if accelerator.sync_gradients:
            scheduler.step()
        optimizer.zero_grad()
    return loss.detach(), grad_norm


def describe_run(accelerator: Accelerator, args, transformer_config: dict) -> tuple[dict, dict]:
    """The bucket config's `model` and `environment`: what the measured seconds and GiB hold for."""
    text = json.dumps(transformer_config, sort_keys=True)
    model = {
        "class": "WanTransformer3DModel",
        "config_hash": hashlib.sha256(text.encode()).hexdigest()[:16],
        "base_model": args.pretrained_model_name_or_path,
    }
    environment = {
        **current_environment(),
        "world_size": accelerator.num_processes,
        "strategy": strategy_of(accelerator),
        "dtype": {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}[accelerator.mixed_precision],
        "activation_checkpointing": args.gradient_checkpointing or _fsdp_checkpoints(accelerator),
        "patched": not args.no_patch,
        "lora": False,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
    }
    return model, environment


def _load_part(part_class, args, subfolder: str) -> dict:
    try:
        return part_class.load_config(args.pretrained_model_name_or_path, subfolder=subfolder, revision=args.revision)
    except OSError as error:
        raise UserError(
            f"expected a Wan pipeline (folder or Hub id) with the folder {subfolder!r}, but "
            f"{args.pretrained_model_name_or_path!r}: {error}"
        ) from None


def _fsdp_checkpoints(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type == DistributedType.FSDP and bool(
        accelerator.state.fsdp_plugin.activation_checkpointing
    )


def _refuse_unsafe_sharding(accelerator: Accelerator, gradient_checkpointing: bool) -> None:
    """Names the FSDP settings that fail deep inside the first step, or do the same work twice."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return
    plugin = accelerator.state.fsdp_plugin
    if plugin.cpu_ram_efficient_loading:
        raise UserError(
            "the launch configuration has fsdp_cpu_ram_efficient_loading: true (accelerate's default), which cannot "
            "load Wan: its `scale_shift_table` lies outside any submodule. Set it to false in the `fsdp_config`."
        )
    if gradient_checkpointing and plugin.activation_checkpointing:
        raise UserError(
            "activations are to be checkpointed twice: --gradient_checkpointing and fsdp_activation_checkpointing: "
            "true in the launch configuration. Leave --gradient_checkpointing out."
        )
    policy = plugin.mixed_precision_policy
    if gradient_checkpointing and policy is not None and policy.param_dtype is not None and policy.cast_forward_inputs:
        raise UserError(
            "--gradient_checkpointing does not go with cast_forward_inputs=True of FSDP2: timesteps and rotary tables "
            f"lose precision to {policy.param_dtype}, and torch 2.11 fails when it recomputes a block, since it casts "
            "them in forward only. Set fsdp_activation_checkpointing: true in the launch configuration instead."
        )
