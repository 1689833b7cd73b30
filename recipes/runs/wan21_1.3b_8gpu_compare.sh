#!/usr/bin/env bash
# The paper's 8-GPU table: Wan 2.1 1.3B at full depth, FSDP2 on eight GPUs, K = 4, stills to 81 frames at 480p, one epoch
# of the same samples in each arm, about 190 micro-batches each, the most telling arms first; under a minute an arm on
# H200s, and the compiled ones make their graphs before.
# Usage: recipes/runs/wan21_1.3b_8gpu_compare.sh CONFIG EAGER_CONFIG [output folder] [--predict 8]
# CONFIG and EAGER_CONFIG: recipes/benchmark_shapes.py on these GPUs, as it is and with --no_patch. First with --predict 8,
# and its predicted.json kept. RANKS=2 rehearses it on two GPUs; CONFIG_14B, measured with 14B, adds two arms of that.
set -euo pipefail
cd "$(dirname "$0")/../.."
config=$1 eager=$2 out=${3:-wan21_1.3b_8gpu} ranks=${RANKS:-8}
launch=(accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes "$ranks")
if [[ " $* " == *" --predict "* ]]; then launch=(python); fi
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
common=(--shapes recipes/mixed_shapes.json --m_mem_tokens 32760 --gradient_accumulation_steps 4 "${@:4}")
"${launch[@]}" recipes/compare_schedules.py --config recipes/runs/wan2.1_1.3b.json --output_dir "$out" \
    --bucket_config "$config" --eager_bucket_config "$eager" --samples $((800 * ranks / 8)) "${common[@]}" \
    --arms equal_token/none/eager dual/auto/patched equal_token/same_bucket/compiled dual/step/patched \
    equal_token/same_bucket/eager equal_token/same_bucket/patched dual/auto/eager equal_token/none/compiled \
    dual/auto/compiled dual/step/eager
if [[ -n "${CONFIG_14B:-}" ]]; then
    "${launch[@]}" recipes/compare_schedules.py --config recipes/runs/wan2.1_14b.json --output_dir "${out}_14b" \
        --bucket_config "$CONFIG_14B" --samples $((160 * ranks / 8)) "${common[@]}" \
        --arms equal_token/none/eager dual/auto/patched
fi
