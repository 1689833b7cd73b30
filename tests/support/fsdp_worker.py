"""Run on 2 ranks by test_distributed.py: prints what the accelerator made of a Wan model, then rank 1 fails.

Argument: "user" for a mistake of the user; "bug" for one of ours, without the model.
"""

import json
import sys

import torch
from accelerate.utils import set_seed

from adaptiveload_hf import UserError, make_accelerator
from adaptiveload_hf.distributed import all_ranks_fail_together, model_input_dtype, strategy_of

TIMESTEP = 997.3


def look(accelerator) -> dict:
    from diffusers import WanTransformer3DModel  # seconds to import, and most runs of this script end before

    set_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2
    )
    model.enable_gradient_checkpointing()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    seen = {}
    model.condition_embedder.timesteps_proj.register_forward_hook(
        lambda module, inputs, output: seen.update(timestep=inputs[0].tolist())
    )
    model.blocks[0].register_forward_hook(
        lambda module, inputs, output: seen.update(
            hidden=str(inputs[0].dtype), rotary=sorted({str(table.dtype) for table in inputs[3]})
        )
    )
    dtype = model_input_dtype(accelerator)
    batch = 1 + accelerator.process_index
    for micro_step in range(2):
        with accelerator.accumulate(model):
            output = model(
                hidden_states=torch.randn(batch, 16, 2, 4, 4, dtype=dtype),
                timestep=torch.full((batch,), TIMESTEP),
                encoder_hidden_states=torch.randn(batch, 3, 16, dtype=dtype),
                return_dict=False,
            )[0]
            accelerator.backward(output.float().square().mean())
            if micro_step == 0:
                gradients = [p.grad for p in model.parameters()]
                seen["whole_gradient"] = sum(g.numel() for g in gradients)
                seen["held_gradient"] = sum(g.to_local().numel() for g in gradients)
                seen["gradient_dtype"] = sorted({str(g.to_local().dtype) for g in gradients})
                local = torch.cat([g.to_local().flatten() for g in gradients])
                seen["finer_than_bfloat16"] = int((local != local.bfloat16()).sum())
            else:
                seen["grad_norm"] = float(accelerator.clip_grad_norm_(model.parameters(), 1.0).full_tensor())
            optimizer.step()
            optimizer.zero_grad()
    return seen


def main():
    accelerator = make_accelerator(gradient_accumulation_steps=2)
    with all_ranks_fail_together(accelerator):
        found = {
            "rank": accelerator.process_index,
            "ranks": accelerator.num_processes,
            "is_fsdp2": accelerator.is_fsdp2,
            "device": accelerator.device.type,
            "strategy": strategy_of(accelerator),
            **(look(accelerator) if sys.argv[1] == "user" else {}),
        }
        sys.stdout.write(json.dumps(found) + "\n")  # one write: the ranks share the pipe
        sys.stdout.flush()
        accelerator.wait_for_everyone()
        if accelerator.process_index == 1:
            if sys.argv[1] == "user":
                raise UserError("sample 7 (a.mp4) holds a NaN")
            raise ZeroDivisionError("a bug on rank 1")
        accelerator.wait_for_everyone()  # never met


if __name__ == "__main__":
    main()
