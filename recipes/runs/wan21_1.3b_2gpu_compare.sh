#!/usr/bin/env bash
# Wan 2.1 1.3B at full depth, FSDP2 on two GPUs, K = 4, stills to 49 frames at 480p: one epoch of the same samples in
# each arm, the most telling arms first; about 40 s an arm on H200s, and the compiled ones make their graphs before.
# Usage: recipes/runs/wan21_1.3b_2gpu_compare.sh LAW [output folder] [--predict 2]
# LAW: of wan21_1.3b_2gpu_law.sh on these two GPUs.
set -euo pipefail
cd "$(dirname "$0")/../.."
law=$1 out=${2:-wan21_1.3b_2gpu}
launch=(accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 2)
if [[ " $* " == *" --predict "* ]]; then launch=(python); fi
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
"${launch[@]}" recipes/compare_schedules.py --config recipes/runs/wan2.1_1.3b.json \
    --bucket_config "$law/patched" --eager_bucket_config "$law/eager" --output_dir "$out" \
    --shapes recipes/runs/mixed_shapes_49_frames.json --samples 310 --m_mem_tokens 40560 \
    --gradient_accumulation_steps 4 \
    --arms equal_token/none/eager dual/auto/patched equal_token/same_bucket/compiled equal_token/same_bucket/eager \
    dual/step/patched dual/auto/eager dual/auto/compiled equal_token/none/compiled dual/none/eager \
    equal_token/same_bucket/patched dual/auto/patched_compiled "${@:3}"
