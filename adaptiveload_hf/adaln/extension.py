"""Is the CUDA extension there, and does it fit the GPU?"""

import functools
from pathlib import Path

import torch

from .schema_digest import MARK, schema_digest

OLDEST_TORCH = (2, 11)

_PATH = Path(__file__).parent.parent / "_C.abi3.so"
# What CUDA answers where no code of the build is for a GPU, or where its driver cannot compile the PTX.
_NO_CODE = (98, 200, 209, 218, 221, 222, 223)
_OUT_OF_MEMORY = 2
_BUILD = "`pip install --no-build-isolation .` in a checkout, after torch and with nvcc"


def find_problem(path: Path) -> str | None:
    """Loads the extension at `path`, or says why it cannot be."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        return f"torch {torch.__version__} is too old for it: it needs 2.11, build it again after an upgrade"
    if not path.exists():
        return f"not built: install with {_BUILD}"
    # Before it is loaded: an op that is called with other arguments than it was built for reads what is not there.
    mark = MARK + schema_digest(Path(__file__).with_name("schemas.py"))
    if mark.encode() not in path.read_bytes():
        return (
            f"{path.name} was built for ops with other arguments, from another version; build it again with {_BUILD}"
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        # torch keeps what the loader said (a library that is missing or too old) as the cause of its own words.
        return f"{path.name} is there but does not load ({error.__cause__ or error}); build it again with {_BUILD}"
    return None


@functools.cache
def device_problem(device: int) -> str | None:
    """Why the loaded extension cannot run on this GPU, or None.

    Raises:
        torch.OutOfMemoryError: the GPU is full: there is no telling, and another call may succeed.
        RuntimeError: another CUDA error, that of an earlier kernel for instance.
    """
    code = torch.ops.adaptiveload.device_error(device)
    if code == 0:
        return None
    if code == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"CUDA out of memory. No kernel of adaptiveload could be loaded on GPU {device}.")
    if code not in _NO_CODE:
        raise RuntimeError(f"adaptiveload: CUDA error {code} where its kernels were to be loaded on GPU {device}.")
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return (
        f"it holds no code for GPU {device}, {name} (sm_{major}{minor}, CUDA error {code}); "
        f"build it again on this machine with TORCH_CUDA_ARCH_LIST={major}.{minor}"
    )


load_problem = find_problem(_PATH)
