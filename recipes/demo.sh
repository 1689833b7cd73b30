#!/usr/bin/env bash
# The whole product on small real files, two CPU processes: prepare -> measure, fit, plan -> train -> resume -> report.
# Usage: recipes/demo.sh [folder with your own clips and stills; captions as docs/data.md says]
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export TRANSFORMERS_VERBOSITY=error # each process would ask for torchvision, which nothing here uses
out=${DEMO_OUTPUT:-demo_output}
data=${1:-$out/clips}
launch="accelerate launch --config_file accelerate_configs/cpu.yaml --main_process_port 0"
say() { printf '\n\033[1m== %s\033[0m\n' "$*" >&2; }

mkdir -p "$out"
if [ -n "${1:-}" ]; then
    [ -d "$data" ] || { echo "demo: there is no folder $data; DATA must be one of clips and stills" >&2; exit 1; }
    case "$(realpath "$data")/" in "$(realpath "$out")"/*)
        echo "demo: $data lies in $out, which the demo empties first: move it out of there" >&2
        exit 1 ;;
    esac
fi
rm -rf "$out"
mkdir -p "$out"

# Of your own clips, at the demo's size, the buckets that fit them.
buckets="1x96x96 1x96x160 1x160x96 9x96x160 17x96x96 17x96x160 33x96x160"
[ -z "${1:-}" ] || buckets="auto --height 96 --width 160 --max_num_frames 49"

say "1/5 real files and a tiny, randomly initialised Wan pipeline"
[ -n "${1:-}" ] || python recipes/make_demo_clips.py --output_dir "$data"
python recipes/tiny_wan.py --output_dir "$out/tiny_wan"

say "2/5 decode with PyAV, encode with AutoencoderKLWan and UMT5"
python recipes/prepare_dataset.py --instance_data_root "$data" --output_dir "$out/prepared" \
    --pretrained_model_name_or_path "$out/tiny_wan" --fps 16 \
    --max_sequence_length 160 --video_resolution_buckets $buckets

adaptiveload scan "$out/prepared"

say "3/5 time training steps on the live FSDP2 model, fit, plan, simulate"
$launch recipes/benchmark_shapes.py --pretrained_model_name_or_path "$out/tiny_wan" --dataset "$out/prepared" \
    --output_dir "$out/config" --gradient_accumulation_steps 2 --max_points 10

say "4/5 train on 2 ranks: 12 optimizer steps and a checkpoint, then resume to 24 with the samples not yet seen"
train="$launch recipes/train_wan.py --pretrained_model_name_or_path $out/tiny_wan --dataset $out/prepared
    --bucket_config $out/config --output_dir $out/run --gradient_accumulation_steps 2 --checkpointing_steps 12
    --learning_rate 1e-3 --seed 0"
$train --max_train_steps 12
$train --max_train_steps 24 --resume_from_checkpoint latest

say "5/5 report"
adaptiveload report "$out/config" --dataset "$out/prepared" --run "$out/run" --output "$out/report.html" \
    --world-size 2 --gradient-accumulation-steps 2

say "done; step by step, and with your own model and GPUs: docs/quickstart.md"
