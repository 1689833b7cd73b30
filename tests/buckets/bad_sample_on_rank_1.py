"""Run on 2 ranks by test_loader_distributed.py: rank 1 meets a bad sample while rank 0 goes on to a collective."""

from accelerate import Accelerator
from support.bucketed import NumberedRows
from support.loader_ranks import SAMPLES, make_loader

from adaptiveload_hf.errors import UserError


class OneBadRow(NumberedRows):
    bad = None

    def __getitem__(self, index):
        if index == self.bad:
            raise UserError(f"sample {index} holds a NaN")
        return super().__getitem__(index)


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    dataset = OneBadRow(SAMPLES)
    loader = make_loader(accelerator, dataset)
    dataset.bad = int(loader.schedule.micro_batch(0, 1)[0])
    for _ in loader:
        accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
