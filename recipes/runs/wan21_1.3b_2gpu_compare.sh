#!/usr/bin/env bash
# Wan 2.1 1.3B at full depth, FSDP2 on two GPUs, one epoch of the same samples in each arm; the first three take two
# minutes on H200s, the compiled one makes its graphs first.
# Usage: recipes/runs/wan21_1.3b_2gpu_compare.sh CONFIG EAGER_CONFIG [output folder] [--predict 2]
# CONFIG and EAGER_CONFIG: recipes/benchmark_shapes.py on these two GPUs, as it is and with --no_patch.
set -euo pipefail
cd "$(dirname "$0")/../.."
config=$1 eager=$2 out=${3:-wan21_1.3b_2gpu}
launch=(accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 2)
if [[ " $* " == *" --predict "* ]]; then launch=(python); fi
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
"${launch[@]}" recipes/compare_schedules.py --config recipes/runs/wan2.1_1.3b.json \
    --bucket_config "$config" --eager_bucket_config "$eager" --output_dir "$out" \
    --shapes recipes/runs/mixed_shapes_49_frames.json --samples 250 --m_mem_tokens 40560 \
    --arms equal_token/none/eager dual/window:8/patched equal_token/same_bucket/eager \
    equal_token/none/compiled dual/window:8/eager dual/none/eager "${@:4}"
