#!/usr/bin/env bash
# Two and eight ranks of Wan 2.1 1.3B at full depth, put together from micro-batches that are timed on one GPU; about
# three minutes on an H200, of which those with torch.compile take half.
# Usage: recipes/runs/wan21_1.3b_replay.sh [output folder] [--predict 2]
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-wan21_1.3b_replay}
mkdir -p "$out"
adaptiveload fit tests/data/h200_wan_patched_steps.jsonl --output "$out/law"
launch=(accelerate launch --config_file accelerate_configs/single.yaml --mixed_precision bf16)
ranks=(--replay 2 8)
if [[ "${2:-}" == --predict ]]; then launch=(python) ranks=(--predict "$3"); fi
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
"${launch[@]}" recipes/compare_schedules.py --config recipes/runs/wan2.1_1.3b.json --gradient_checkpointing \
    --bucket_config "$out/law" --output_dir "$out" "${ranks[@]}" \
    --shapes recipes/mixed_shapes.json --samples 2950 --m_mem_tokens 32760 --gradient_accumulation_steps 4 \
    --arms equal_token/none/patched dual/step/patched dual/auto/patched dual/window:8/patched \
    equal_token/same_bucket/patched equal_token/none/compiled equal_token/same_bucket/compiled dual/auto/compiled \
    dual/step/patched_compiled dual/auto/patched_compiled dual/window:8/patched_compiled \
    equal_token/same_bucket/patched_compiled equal_token/none/eager equal_token/same_bucket/eager dual/none/eager \
    dual/step/eager dual/auto/eager dual/window:8/eager
