"""`patch_model` in a diffusers script: one line more. A LoRA takes a training step with fused operations.

python recipes/examples/patched_script.py Wan-AI/Wan2.1-T2V-1.3B-Diffusers
"""

import sys

import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig

from adaptiveload_hf import patch_model

device = "cuda" if torch.cuda.is_available() else "cpu"
model = WanTransformer3DModel.from_pretrained(sys.argv[1], subfolder="transformer", dtype=torch.bfloat16)
model.requires_grad_(False).to(device)
model.add_adapter(LoraConfig(r=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
print(patch_model(model))

latent, noise = torch.randn(2, 1, model.config.in_channels, 5, 32, 32, device=device, dtype=model.dtype)
caption = torch.randn(1, 512, model.config.text_dim, device=device, dtype=model.dtype)
predicted = model((latent + noise) / 2, torch.tensor([500.0], device=device), caption).sample
loss = (predicted.float() - (noise - latent).float()).square().mean()
loss.backward()
print(f"loss {loss.item():.4f}")
