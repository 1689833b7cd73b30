#!/usr/bin/env bash
# What does a step of Wan 2.1 1.3B cost on these two GPUs under FSDP2, patched and eager? Seven of the sizes that
# wan21_1.3b_2gpu_compare.sh trains; 100 s on H200s.
# Usage: recipes/runs/wan21_1.3b_2gpu_law.sh [output folder]; it holds the bucket configs patched and eager then.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-wan21_1.3b_2gpu_law}
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
for kernels in patched eager; do
    if [[ $kernels == eager ]]; then options=(--no_patch); else options=(); fi
    accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 2 recipes/benchmark_shapes.py \
        --config recipes/runs/wan2.1_1.3b.json --shapes recipes/runs/mixed_shapes_49_frames.json "${options[@]}" \
        --output_dir "$out/$kernels" \
        --points 1x32x32=30 13x60x104=1 21x32x32=5 9x60x104=2 5x60x104=5 1x32x32=158 13x60x104=2
done
