"""What does every optimizer step of a live run cost, against what the cost model says? For anyone's own loop."""

from __future__ import annotations

import math
import statistics
import sys
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from .buckets.training_log import LARGEST_WAIT
from .errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from accelerate import Accelerator

    from .buckets.loader import BucketDataLoader

_WARM_UP_STEPS = 3
_MEMORY = 0.98  # of the running means, a step: they forget what is 100 steps old
_FEWEST_STEPS = 20  # before anything is said to drift
_LARGEST_DRIFT = 0.15
_LARGEST_LAG = 0.10
_REFIT = "adaptiveload fit --from-log metrics.jsonl --output refitted"


class TrainingMonitor:
    """Hands out a loader's batches and describes each optimizer step.

        monitor = TrainingMonitor(accelerator, model, loader)
        for batch in monitor:
            loss = ...                                  # forward, backward, optimizer, as ever
            metrics = monitor.micro_step_done(loss)     # None, or after every K-th micro-step a dict

    It adds one all-gather of 3 K + 2 numbers an optimizer step, the one in which the loss is averaged, and device
    events around one block, until `close()` or the monitor is gone; nothing else waits for the device.

    Args:
        accelerator: accelerate's.
        model: as `accelerator.prepare` returned it, or None: then ranks' compute is not measured.
        loader: BucketDataLoader.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module | None, loader: BucketDataLoader):
        self.accelerator, self.loader = accelerator, loader
        self._clock = BlockClock(accelerator.device.type == "cuda")
        hooks = self._clock.attach(repeated_block(model)) if model is not None else ()
        self._take_off = weakref.finalize(self, lambda: [hook.remove() for hook in hooks])
        self._in_seconds = loader.cost_model.unit == "seconds"
        self._drift, self._pace = CostDrift(self._in_seconds), RankPace()
        self._shapes = [str(bucket.shape) for bucket in loader.plan.buckets]
        self._counters = device_counters()
        self._block_seconds: list[float] | None = None  # of the step before
        self._begin_step()

    def _begin_step(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._micro_steps: list[int] = []
        self._pairs: list[tuple | None] = []
        self._data_waits: list[float] = []  # this rank's, before each micro-step

    def __iter__(self) -> Iterator[dict]:
        """Yields the loader's batches; the time in between two is the wait for data."""
        waiting_since = time.perf_counter()
        self._begin_step()
        self._start = waiting_since
        for batch in self.loader:
            self._data_waits.append(time.perf_counter() - waiting_since)
            self._micro_steps.append(batch["micro_step"])
            self._schedule = self.loader.schedule
            self._clock.arm()
            yield batch
            self._check_calls(len(self._micro_steps) - len(self._losses))
            waiting_since = time.perf_counter()
            if not self._micro_steps:  # what the loop did since the last optimizer step, a checkpoint say, is in none
                self._start = waiting_since

    def __len__(self) -> int:
        return len(self.loader)

    def micro_step_done(self, loss: torch.Tensor, flag: bool = False) -> dict | None:
        """To call after each micro-step.

        Args:
            loss: weighted, a scalar tensor, whose mean over the W*K micro-batches is the optimizer step's loss.
            flag: anything that all ranks must hear of, such as a wish to stop.

        Returns:
            None between optimizer steps. After one, on every rank: `loss`; `flag`, true if any rank's was; `seconds`,
            and of them `data_wait_seconds`, in which ranks waited for data (sum over micro-steps of the longest wait:
            all ranks wait for that one); `samples` and `tokens` of all ranks, both a second; `predicted_seconds`
            (sum over micro-steps of the slowest rank's cost; absent where the cost is counted in FLOPs);
            `balance_efficiency` and `step_cv`, predicted; `achieved_efficiency` (sum over micro-steps of the mean over
            ranks of solo seconds, as the cost model has them, over measured seconds);
            `measured_balance_efficiency` (of the step before: mean over maximum over ranks of the seconds in one
            block; absent where they cannot be read); `peak_reserved_gib`; `allocator_retries` and `recompiles` since
            the monitor was made; `micro_batches`, per micro-step and rank; `findings`, sentences for a person.

        Raises:
            UserError: loss is not a tensor of one number; or it is called without a batch of the monitor, or twice
                for one. A batch without a call ends the loop over the monitor with a UserError: on one rank alone,
                the others would wait for its loss for ever.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = f"a tensor {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UserError(
                f"micro_step_done takes the weighted loss of a micro-batch, a tensor of one number, but found "
                f"{found}. Pass what accelerator.backward takes."
            )
        self._check_calls(len(self._micro_steps) - len(self._losses) - 1)
        self._losses.append(loss.detach().float())
        self._pairs.append(self._clock.take())
        # Not by sync_gradients, which a micro-batch that the loop passes over leaves as it was.
        if (self._micro_steps[-1] + 1) % self._schedule.gradient_accumulation_steps:
            return None
        sent = self._exchange(flag)
        # While the device still works: whatever comes after the numbers are read, it waits for.
        cost = self._of_ranks(self._schedule.cost)
        described = {**self._describe(cost), **counted_since(self._counters)}
        received = sent.tolist()  # waits for the device to end this step
        seconds = time.perf_counter() - self._start
        # Plain numbers: after a step's work numpy's first calls take 0.1 ms each, for nothing of it is in the caches.
        flags, paces, *rest = zip(*received)
        # Each per micro-step, of all processes.
        waits, blocks, losses = (rest[i : i + len(cost)] for i in range(0, len(rest), len(cost)))
        loss = sum(map(sum, losses)) / len(losses) / len(received)
        # A rank may have begun to wait while this one did something between its optimizer steps.
        waited = min(seconds, sum(map(max, waits)))
        metrics = {"loss": loss, "flag": any(flags), "seconds": seconds, "data_wait_seconds": waited, **described}
        metrics |= {f"{what}_per_second": metrics[what] / seconds for what in ("samples", "tokens")}
        if self._in_seconds:
            metrics["achieved_efficiency"] = sum(map(sum, cost)) / self._schedule.world_size / seconds
        compute = sum(map(sum, blocks)) / len(received)
        if math.isfinite(compute):
            metrics["measured_balance_efficiency"] = compute / sum(map(max, blocks))
        slowest = [row[each.index(max(each))]["shape"] for row, each in zip(metrics["micro_batches"], cost)]
        drifting = []
        if waited <= LARGEST_WAIT * seconds:
            drifting = self._drift.update(seconds - waited, slowest, [max(each) for each in cost])
        metrics["findings"] = [*drifting, *self._pace.compare(paces)]
        self._block_seconds = [seconds_between(pair) for pair in self._pairs]
        self._pace.update(sum(self._block_seconds), sum(each[self.loader.rank] for each in cost))
        self._begin_step()
        return metrics

    def _check_calls(self, missing: int) -> None:
        if missing:
            raise UserError(
                "TrainingMonitor needs one call of micro_step_done for each batch that a loop over the monitor gets, "
                f"but there was {'none' if missing > 0 else 'one more'}. Call it also for a batch that the loop skips "
                "(with a loss of 0), on every rank."
            )

    def _exchange(self, flag: bool) -> torch.Tensor:
        """Of each process flag, pace, and of its micro-steps the waits for data, the seconds in one block (in the step
        before) and the losses.

        On the device, which has yet to fill it in.
        """
        blocks = self._block_seconds or [float("nan")] * len(self._losses)
        losses = torch.stack(self._losses).view(len(self._losses))  # one may be a tensor of one element
        # From pinned memory the copy does not wait for the device.
        values = [flag, self._pace.value, *self._data_waits, *blocks]
        values = torch.tensor(values, dtype=torch.float32, pin_memory=losses.is_cuda)
        return self.accelerator.gather(torch.cat([values.to(losses.device, non_blocking=True), losses])[None])

    def _of_ranks(self, values: np.ndarray) -> list[list]:
        """What the schedule has of each micro-batch, for this step's: of each micro-step a list by rank."""
        world_size = self._schedule.world_size
        return [values[step * world_size : (step + 1) * world_size].tolist() for step in self._micro_steps]

    def _describe(self, cost: list[list[float]]) -> dict:
        """Counts over all ranks, from the schedule, without asking them."""
        schedule = self._schedule
        found = map(self._of_ranks, (schedule.bucket, schedule.sizes, schedule.tokens, schedule.loss_weight))
        # Per micro-step and rank (bucket, B, S, loss weight); loss weight 0 marks padding.
        rows = [[*zip(*of_step)] for of_step in zip(*found)]
        counted = [(size, tokens) for row in rows for _, size, tokens, weight in row if weight > 0]
        mean, largest = [sum(each) / len(each) for each in cost], [max(each) for each in cost]
        spread = [math.dist(each, [at] * len(each)) / at / math.sqrt(len(each)) for each, at in zip(cost, mean)]
        described: dict = {
            "samples": sum(size for size, _ in counted),
            "tokens": sum(size * tokens for size, tokens in counted),
            "balance_efficiency": sum(mean) / sum(largest),
            "step_cv": sum(spread) / len(spread),
            "micro_batches": [
                [
                    {"shape": self._shapes[bucket], "tokens": tokens, "batch_size": size}
                    for bucket, size, tokens, _ in row
                ]
                for row in rows
            ],
        }
        if self._in_seconds:
            described["predicted_seconds"] = sum(largest)
        return described

    def status_line(self, metrics: dict) -> str:
        """One line for a person about what `micro_step_done` returned."""
        predicted = f" (predicted {metrics['predicted_seconds']:.2f})" if "predicted_seconds" in metrics else ""
        return (
            f"loss {metrics['loss']:.4f} | {metrics['seconds']:.2f} s{predicted} | "
            f"{metrics['samples_per_second']:.2f} samples/s | "
            f"{metrics['tokens_per_second'] / self.accelerator.num_processes:.0f} tokens/s/rank | "
            f"balance efficiency {metrics['balance_efficiency']:.3f} | "
            f"data wait {metrics['data_wait_seconds']:.3f} s"
        )

    def close(self) -> None:
        """Takes the hooks off the model."""
        self._take_off()


class BlockClock:
    """Times the first call of one module after each `arm()`: the innermost forward, where no rank waits for another.

    Hooks of FSDP that gather weights lie around these, and a recomputation in backward comes second. A copy of the
    model gets a clock of its own, which nobody arms.
    """

    def __init__(self, on_gpu: bool):
        self._on_gpu = on_gpu
        self._armed, self._start, self._pair = False, None, None

    def __reduce__(self):
        return (BlockClock, (self._on_gpu,))

    def attach(self, block: nn.Module | None) -> tuple:
        """Hooks `block`, the innermost of everything that is hooked on it; returns the hooks."""
        if block is None:
            return ()
        return block.register_forward_pre_hook(self.begin), block.register_forward_hook(self.end, prepend=True)

    def arm(self) -> None:
        self._armed, self._start, self._pair = True, None, None

    def take(self) -> tuple | None:
        """The two moments around the call, or None if there was none."""
        return self._pair

    def begin(self, module, inputs) -> None:
        # Where a model is compiled as a whole, a moment would break its graph.
        if not torch.compiler.is_compiling() and self._armed:
            self._armed, self._start = False, self.now()

    def end(self, module, inputs, output) -> None:
        if not torch.compiler.is_compiling() and self._start is not None:
            self._pair, self._start = (self._start, self.now()), None

    def now(self) -> torch.cuda.Event | float:
        """A moment: on a GPU an event in the current stream, which does not wait."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def seconds_between(pair: tuple | None) -> float:
    """NaN where nothing was timed. Events must have passed."""
    if pair is None:
        return float("nan")
    begin, end = pair
    return begin.elapsed_time(end) / 1000 if isinstance(begin, torch.cuda.Event) else end - begin


def repeated_block(model: nn.Module) -> nn.Module | None:
    """The first of the model's longest list of blocks; None where there is none, or where it is compiled.

    Inside a compiled block an event would break the graph. A list within a block is none of blocks, however long.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and module}
    outermost = [lists[name] for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    block = max(outermost, key=len, default=[None])[0]
    while hasattr(block, "_checkpoint_wrapped_module"):
        block = block._checkpoint_wrapped_module
    compiled = block is not None and (hasattr(block, "_orig_mod") or block._compiled_call_impl is not None)
    return None if compiled else block


def device_counters() -> dict[str, int]:
    """Allocator retries and peak reserved bytes of this rank's GPU, 0 without one; and graphs that torch.compile made.

    All since this process began.
    """
    # `memory_stats` would flatten and sort a hundred entries, and `max_memory_reserved` once more.
    stats = torch.cuda.memory_stats_as_nested_dict() if torch.cuda.is_available() else {}
    dynamo = sys.modules.get("torch._dynamo.utils")
    return {
        "allocator_retries": stats.get("num_alloc_retries", 0),
        "recompiles": 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"],
        "peak_reserved_bytes": stats["reserved_bytes"]["all"]["peak"] if "reserved_bytes" in stats else 0,
    }


def counted_since(earlier: dict[str, int]) -> dict:
    """What was counted since `earlier`, and the peak memory of this rank in GiB."""
    now = device_counters()
    peak_gib = now["peak_reserved_bytes"] / 2**30
    return {name: now[name] - earlier[name] for name in ("allocator_retries", "recompiles")} | {
        "peak_reserved_gib": peak_gib
    }


class CostDrift:
    """Is a bucket's cost still what the model predicts, relative to the others', and is the whole?

    A step's seconds over the predicted ones are put down to the buckets of the slowest rank of each of its
    micro-steps, by their share of the prediction.

    Args:
        in_seconds: the cost is; else only buckets are compared with one another.
    """

    def __init__(self, in_seconds: bool):
        self._in_seconds, self._steps = in_seconds, 0
        self._sums: dict[str, tuple[float, float, int]] = {}  # bucket -> measured, predicted, micro-steps
        self._said: set[str] = set()

    def update(self, seconds: float, slowest: list[str], predicted: list[float]) -> list[str]:
        """Takes in a step.

        Args:
            seconds: of the step, without its wait for data, which was short.
            slowest: the bucket of each micro-step's slowest rank. predicted: its cost.

        Returns:
            A sentence for each bucket that now drifts, once.
        """
        self._steps += 1
        new = set(slowest) - self._sums.keys()
        self._sums |= dict.fromkeys(new, (0.0, 0.0, 0))
        if new or self._steps <= _WARM_UP_STEPS:  # a first time compiles, tunes or allocates
            return []
        ratio = seconds / sum(predicted)
        for shape, (measured, expected, count) in self._sums.items():
            self._sums[shape] = (_MEMORY * measured, _MEMORY * expected, count)
        for shape, cost in zip(slowest, predicted):
            measured, expected, count = self._sums[shape]
            self._sums[shape] = (measured + ratio * cost, expected + cost, count + 1)
        return self._findings()

    def _findings(self) -> list[str]:
        measured, predicted, _ = map(sum, zip(*self._sums.values()))
        whole = measured / predicted
        found = {}
        if self._in_seconds and self._steps >= _FEWEST_STEPS and not 0.8 <= whole <= 1.25:
            found["all"] = f"steps take {whole:.2f} times the predicted seconds"
        for shape, (measured, predicted, count) in self._sums.items():
            drift = measured / predicted / whole if count >= _FEWEST_STEPS else 1
            if abs(drift - 1) > _LARGEST_DRIFT:
                found[shape] = f"bucket {shape} takes {drift:.2f} times its share of the prediction"
        fresh = [text for name, text in found.items() if name not in self._said]
        self._said |= found.keys()
        return [f"{text}: refit with `{_REFIT}`" for text in fresh]


class RankPace:
    """Does one rank take longer than the others for the same work?"""

    def __init__(self):
        self._measured = self._predicted = 0.0
        self._steps, self._said = 0, set()

    @property
    def value(self) -> float:
        """Seconds in one block over predicted cost, of this rank."""
        return self._measured / self._predicted if self._predicted else float("nan")

    def update(self, measured: float, predicted: float) -> None:
        self._steps += 1
        if self._steps > _WARM_UP_STEPS and math.isfinite(measured):
            self._measured = _MEMORY * self._measured + measured
            self._predicted = _MEMORY * self._predicted + predicted

    def compare(self, paces: tuple[float, ...]) -> list[str]:
        """A sentence for each process that now lags, once. paces: of all processes."""
        if self._steps < _FEWEST_STEPS or len(paces) < 2 or not math.isfinite(sum(paces)):
            return []
        found = []
        least = sorted(paces)[len(paces) // 2 - 1]  # the median of whichever others is not less
        for process, pace in enumerate(paces):
            if pace <= (1 + _LARGEST_LAG) * least or process in self._said:
                continue
            lag = pace / statistics.median(paces[:process] + paces[process + 1 :])
            if lag > 1 + _LARGEST_LAG:
                self._said.add(process)
                found.append(
                    f"process {process} takes {lag:.2f} times as long as the others for the same work, and all wait "
                    "for it: look for another job on its GPU, or for throttling (nvidia-smi -q -d PERFORMANCE)"
                )
        return found
