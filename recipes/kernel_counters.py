"""Calls the CUDA kernels that matter most once each, so that ncu reads what they move.

    ncu --clock-control none --cache-control all -k regex:_rows --csv --page raw \\
        --metrics gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum python recipes/kernel_counters.py
"""

import torch
from kernel_cases import CASES, contenders, make_arguments

OPS = ("layer_norm_modulate", "gate_residual_layer_norm_modulate", "rms_norm_rope")
WIDTH = 5120


def main():
    torch.manual_seed(0)
    for op in OPS:
        case = next(c for c in CASES if c.op == op and c.shape[2] == WIDTH)
        call, wanted = contenders(case)["CUDA"](**make_arguments(case))
        outputs = call()
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.grad(outputs, wanted, [torch.randn_like(output) for output in outputs])
        torch.cuda.synchronize()
        print(case.name, "least bytes, forward and backward:", *case.least_bytes)


if __name__ == "__main__":
    main()
