"""Load a bucket config that somebody measured and pushed, and plan your own data with it.

python recipes/examples/pushed_config.py user/wan-1.3b-h200
"""

import sys

from adaptiveload_hf import BucketConfig, LatentShape

config = BucketConfig.from_pretrained(sys.argv[1])  # or a folder; only JSON is read
print("measured on:", config.environment)

samples = {LatentShape.parse("1x60x104"): 8000, LatentShape.parse("21x60x104"): 500}
plan = config.plan(samples, world_size=8, gradient_accumulation_steps=2)
for bucket in plan.buckets:
    print(f"{bucket.shape}: {bucket.count} samples, batch size {bucket.batch_size}, {bucket.seconds:.3g} s")
print(*plan.findings, sep="\n")
