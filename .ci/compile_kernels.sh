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
export headers target output

# One translation unit: `$1` is the source, the rest goes to the compiler; its words land in $log.
compile() {
  local source=$1
  shift
  log="$output/$(basename "$source").log"
  if ! "$@" -c "$source" -o "$log.o" >"$log" 2>&1; then
    cat "$log"
    echo "compile_kernels: $source does not compile" >&2
    return 1
  fi
  if grep -E '^(\./)?csrc/.*warning' "$log"; then
    echo "compile_kernels: warnings in $source" >&2
    return 1
  fi
}

check() {
  local source=$1 log architecture kernels
  if [[ $source == *.cpp ]]; then
    compile "$source" nvcc -std=c++17 -O1 -DUSE_CUDA -DTORCH_TARGET_VERSION="$target" -isystem "$headers" \
      -isystem "$headers/torch/csrc/api/include" -Xcompiler -fPIC,-Wall,-Wextra || return 1
    echo "$source: no warning"
    return
  fi
  # The two definitions are what PyTorch's own build adds: with them bfloat16 does not convert by itself.
  compile "$source" nvcc -std=c++17 -O3 -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 \
    -DUSE_CUDA -D__CUDA_NO_BFLOAT16_CONVERSIONS__ -D__CUDA_NO_HALF_CONVERSIONS__ \
    -Xptxas -v -Xcompiler -Wall,-Wextra || return 1
  # Every instance of every kernel, so every width. A stack frame is an array that no register can hold: as slow.
  if grep -B1 -E '[1-9][0-9]* bytes (stack frame|spill)' "$log"; then
    echo "compile_kernels: $source spills registers" >&2
    return 1
  fi
  for architecture in sm_80 sm_90; do
    kernels=$(grep -c "Compiling entry function .* for '$architecture'" "$log" || true)
    echo "$source $architecture: $kernels kernels, no spill, no warning"
  done
}

export -f compile check
printf '%s\n' csrc/*.cu csrc/ops/*.cpp | xargs -P "$(nproc)" -I{} bash -c 'check "$1"' _ {}
