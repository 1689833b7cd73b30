#!/usr/bin/env bash
# What does a step of Wan 2.1 1.3B cost on this GPU? 12 points on random weights, from stills to 81 frames at 480p.
# Usage: recipes/runs/benchmark_wan_1.3b.sh [output folder]
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTORCH_ALLOC_CONF=expandable_segments:True
out=${1:-benchmark_wan_1.3b}
mkdir -p "$out"
echo '{"1x60x104": 400, "5x60x104": 160, "9x60x104": 120, "13x60x104": 100, "21x60x104": 80}' > "$out/shapes.json"
accelerate launch --config_file accelerate_configs/single.yaml recipes/benchmark_shapes.py \
    --config recipes/runs/wan2.1_1.3b.json --shapes "$out/shapes.json" --output_dir "$out/config" \
    --mixed_precision bf16 --gradient_checkpointing
