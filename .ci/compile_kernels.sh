#!/usr/bin/env bash
# Do the kernels compile for sm_80 and sm_90 without a warning in our code and without a register spill?
#
# Usage: .ci/compile_kernels.sh [PYTHON]. PYTHON has torch (any build: only its headers are used). Needs nvcc.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
headers=$("$python" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent / "include")')
target=$(sed -n 's/^TORCH_TARGET_VERSION = "\(.*\)".*/\1/p' setup.py)
output=$(mktemp -d)
trap 'rm -rf "$output"' EXIT

# One translation unit: `$1` is the source, the rest goes to the compiler; its words land in $output/log.
compile() {
  local source=$1
  shift
  if ! "$@" -c "$source" -o "$output/object.o" >"$output/log" 2>&1; then
    cat "$output/log"
    echo "compile_kernels: $source does not compile" >&2
    exit 1
  fi
  if grep -E '^(\./)?csrc/.*warning' "$output/log"; then
    echo "compile_kernels: warnings in $source" >&2
    exit 1
  fi
}

for source in csrc/*.cu; do
  # The two definitions are what PyTorch's own build adds: with them bfloat16 does not convert by itself.
  compile "$source" nvcc -std=c++17 -O3 --threads 2 -gencode arch=compute_80,code=sm_80 \
    -gencode arch=compute_90,code=sm_90 -DUSE_CUDA -D__CUDA_NO_BFLOAT16_CONVERSIONS__ -D__CUDA_NO_HALF_CONVERSIONS__ \
    -Xptxas -v -Xcompiler -Wall,-Wextra
  # Every instance of every kernel, so every width. A stack frame is an array that no register can hold: as slow.
  if grep -B1 -E '[1-9][0-9]* bytes (stack frame|spill)' "$output/log"; then
    echo "compile_kernels: $source spills registers" >&2
    exit 1
  fi
  for architecture in sm_80 sm_90; do
    kernels=$(grep -c "Compiling entry function .* for '$architecture'" "$output/log" || true)
    echo "$source $architecture: $kernels kernels, no spill, no warning"
  done
done

for source in csrc/ops/*.cpp; do
  compile "$source" nvcc -std=c++17 -O1 -DUSE_CUDA -DTORCH_TARGET_VERSION="$target" -isystem "$headers" \
    -isystem "$headers/torch/csrc/api/include" -Xcompiler -fPIC,-Wall,-Wextra
  echo "$source: no warning"
done
