"""Start from latents that musubi-tuner has cached, without measuring anything: its batch sizes, balanced by cost.

python recipes/examples/cached_latents.py CACHE_FOLDER Wan-AI/Wan2.1-T2V-1.3B-Diffusers
"""

import sys

from diffusers import WanTransformer3DModel

from adaptiveload_hf import BucketConfig, BucketDataLoader, load_latent_folder, make_accelerator, read_shapes

cache, pipeline = sys.argv[1:]
dataset, problems = load_latent_folder(cache, latent_normalized=True, prompt_length=512)  # as it stores Wan's
print(f"{len(dataset)} samples", *problems, sep="\n")

batch_sizes = {str(shape): 4 if shape.frames == 1 else 1 for shape in read_shapes(dataset).shapes}
model_config = WanTransformer3DModel.load_config(pipeline, subfolder="transformer")
config = BucketConfig.from_flops(model_config, batch_sizes=batch_sizes)
loader = BucketDataLoader(dataset, config, accelerator=make_accelerator(gradient_accumulation_steps=2))
for batch in loader:
    print(batch["bucket"], list(batch["latent"].shape), list(batch["prompt_embeds"].shape), batch["caption"])
