"""Run on 2 ranks by test_benchmark.py: measures steps that meet in a collective; rank 1 is slower and has less memory.

Arguments: the output path and the largest B * S that fits on rank 1.
"""

import sys
import time

import torch

from adaptiveload_hf import LatentShape, make_accelerator
from adaptiveload_hf.benchmark import Point, measure_steps


def main():
    output_path, fits = sys.argv[1], int(sys.argv[2])
    accelerator = make_accelerator(gradient_accumulation_steps=2)
    sys.stdout.write(f"{accelerator.process_index} begins\n")

    def run_step(shape, batch_size):
        if accelerator.process_index == 1 and batch_size * shape.frames > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        accelerator.reduce(torch.ones(1))
        time.sleep(0.02 + 0.02 * accelerator.process_index)

    points = [Point(LatentShape(tokens, 2, 2), tokens, batch) for tokens, batch in ((1, 1), (4, 1), (4, 2), (16, 1))]
    if accelerator.process_index == 1:
        points = points[::-2]  # as where ranks see other data: the main process's count
    measurements = measure_steps(accelerator, run_step, points, output_path=output_path)
    sys.stdout.write(f"{accelerator.process_index} has {len(measurements)}\n")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
