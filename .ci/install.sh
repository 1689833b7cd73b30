#!/usr/bin/env bash
# Makes .venv with pinned, tested versions: CPU torch where there is no NVIDIA GPU, CUDA torch and the kernels where there is.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=.venv
constraints=.ci/constraints.txt
torch=$(grep '^torch==' $constraints)

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "install: the pinned versions need Python 3.11 or newer, but $python is $("$python" --version 2>&1). Set PYTHON=python3.11 (or newer)." >&2
    exit 1
}
echo "install: making $venv with pinned versions, for make alone; some minutes, and some GB if torch must be downloaded." >&2
[ -x $venv/bin/python ] || "$python" -m venv $venv
pip="$venv/bin/python -m pip --disable-pip-version-check install --quiet"
$pip --upgrade --constraint $constraints pip setuptools wheel numpy # torch warns in the build where numpy is missing

if command -v nvidia-smi > /dev/null; then
    $pip "$torch"
elif ! $pip "$torch+cpu" 2> /dev/null; then
    # No CPU-only build in the configured indexes: the default build runs on a CPU too, but is much larger to download.
    echo "install: no CPU-only build of torch in your pip indexes; taking the default build (several GB on Linux)." >&2
    $pip "$torch"
fi
PYTHONWARNINGS=ignore $pip --constraint $constraints --no-build-isolation --editable '.[recipes,lora,dev]'
