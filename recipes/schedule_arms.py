"""In which ways can the same samples be trained on the same ranks, and what is each predicted to take?"""

from dataclasses import asdict, dataclass

import numpy as np
from random_training import KERNELS
from schedule_gates import shapes_side_by_side, token_share_distance

from adaptiveload_hf import BucketConfig, LatentShape, UserError
from adaptiveload_hf.buckets.cost import CostModel
from adaptiveload_hf.buckets.plan import BucketPlan, make_plan
from adaptiveload_hf.buckets.schedule import EpochSchedule, loss_weights, schedule_epoch
from adaptiveload_hf.buckets.simulate import simulate
from adaptiveload_hf.environment import memory_elsewhere

SAME_BUCKET = "same_bucket"


@dataclass(frozen=True)
class Arm:
    """How batch sizes are chosen, how micro-batches are dealt, and what the blocks run on.

    policy: of `make_plan`. balance: of `schedule_epoch`, or "same_bucket": every rank has the same bucket in a
    micro-step, as diffusion-pipe and NeMo Automodel do it. kernels: one of KERNELS.
    """

    policy: str
    balance: str
    kernels: str

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """Reads `dual/window:8/patched`.

        Raises:
            UserError: another form, or unknown kernels.
        """
        parts = text.split("/")
        if len(parts) != 3 or parts[2] not in KERNELS:
            raise UserError(
                f"an arm is written POLICY/BALANCE/KERNELS with kernels {', '.join(KERNELS)}, such as "
                f"dual/auto/patched, but found {text!r}."
            )
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.policy}/{self.balance}/{self.kernels}"


def scaled(counts: dict[LatentShape, int], samples: int) -> dict[LatentShape, int]:
    """About so many samples in the same proportions, at least one of each shape."""
    total = sum(counts.values())
    return {shape: max(1, round(count * samples / total)) for shape, count in counts.items()}


def schedule_of(
    arm: Arm,
    counts: dict[LatentShape, int],
    config: BucketConfig,
    *,
    m_mem_tokens: int,
    world_size: int,
    gradient_accumulation_steps: int,
    seed: int,
) -> tuple[BucketPlan, EpochSchedule]:
    """Of one arm; sample i is of the same shape in every arm.

    Args:
        counts: samples of each shape; the samples are numbered shape by shape, shapes sorted.
        config: its law gives the batch sizes and the cost that dealing goes by.
        m_mem_tokens: the memory limit, the same for every policy.
    """
    run = {"world_size": world_size, "gradient_accumulation_steps": gradient_accumulation_steps}
    # Same-bucket steps need no dealing; their plan is that of the dealing which comes nearest to it.
    planned_for = "auto" if arm.balance == SAME_BUCKET else arm.balance
    plan = make_plan(
        counts,
        config.cost_model,
        geometry=config.geometry,
        policy=arm.policy,
        m_mem_tokens=m_mem_tokens,
        balance=planned_for,
        **run,
    )
    bucket_of_sample = np.repeat(np.arange(len(plan.buckets)), [bucket.count for bucket in plan.buckets])
    if arm.balance == SAME_BUCKET:
        return plan, same_bucket_schedule(plan, config.cost_model, seed=seed, **run)
    return plan, schedule_epoch(bucket_of_sample, plan, config.cost_model, balance=arm.balance, seed=seed, **run)


def same_bucket_schedule(
    plan: BucketPlan, cost: CostModel, *, world_size: int, gradient_accumulation_steps: int, seed: int
) -> EpochSchedule:
    """All ranks draw from one bucket in each micro-step; micro-steps in random order, each sample once.

    Kinder than the trainers that work so: a bucket's samples are cut evenly instead of leaving a small last batch, and
    no bucket is finished before the next begins.
    """
    random = np.random.default_rng(seed)
    counts = np.array([bucket.count for bucket in plan.buckets])
    sizes = np.array([bucket.batch_size for bucket in plan.buckets])
    tokens = np.array([bucket.tokens for bucket in plan.buckets])
    numbers = -(-counts // (sizes * world_size))
    while numbers.sum() % gradient_accumulation_steps:  # the costliest micro-steps are cut finer, as in our schedules
        seconds = np.where(counts > numbers * world_size, cost.seconds(counts / (numbers * world_size), tokens), 0)
        numbers[np.argmax(seconds)] += 1
    micro_steps, first = [], 0
    for bucket, (count, number) in enumerate(zip(counts.tolist(), numbers.tolist())):
        pieces = np.array_split(first + random.permutation(count), number * world_size)
        micro_steps += [(bucket, pieces[i : i + world_size]) for i in range(0, len(pieces), world_size)]
        first += count
    micro_steps = [micro_steps[i] for i in random.permutation(len(micro_steps))]
    batches = [batch for _, pieces in micro_steps for batch in pieces]
    real = np.array([len(batch) for batch in batches])
    # A bucket of fewer samples than ranks: the others repeat its first one, with weight 0.
    batches = [batch if len(batch) else pieces[0][:1] for _, pieces in micro_steps for batch in pieces]
    bucket_of = np.repeat([bucket for bucket, _ in micro_steps], world_size).astype(np.int32)
    sizes, tokens = np.array([len(batch) for batch in batches]), tokens[bucket_of]
    return EpochSchedule(
        np.concatenate(batches),
        np.concatenate([[0], np.cumsum(sizes)]),
        bucket_of,
        tokens,
        cost.seconds(sizes, tokens),
        loss_weights("token", real, tokens, world_size, gradient_accumulation_steps),
        SAME_BUCKET,
        world_size,
        gradient_accumulation_steps,
    )


def law_of(arm: Arm, laws: dict[str, BucketConfig]) -> CostModel | None:
    """The measured law of the arm's kernels; None where they were not measured."""
    return laws[arm.kernels].cost_model if arm.kernels in laws else None


def predict(arm: Arm, plan: BucketPlan, schedule: EpochSchedule, laws: dict[str, BucketConfig]) -> dict:
    """What the arm is expected to take, and what it trains.

    Args:
        laws: kernels -> the config measured with them.
    """
    law, cost = laws.get(arm.kernels), law_of(arm, laws)
    simulation = simulate(schedule, cost)
    samples = np.where(schedule.loss_weight > 0, schedule.sizes, 0)
    predicted = asdict(simulation) if cost is not None else {}
    lanes = {} if cost is None else lanes_of(plan, schedule, cost)
    if law is not None and law.memory_model is not None:
        ranks, accumulation = schedule.world_size, schedule.gradient_accumulation_steps
        memory, _ = memory_elsewhere(law.memory_model, law.environment, ranks, accumulation)
        predicted["peak_gib"] = float(memory.gib(schedule.sizes, schedule.tokens).max())
    return {
        "arm": str(arm),
        "balance": schedule.balance,
        "ranks": schedule.world_size,
        "micro_steps": schedule.num_micro_steps,
        "samples": int(samples.sum()),
        "tokens": int((samples * schedule.tokens).sum()),
        "batch_sizes": {str(bucket.shape): bucket.batch_size for bucket in plan.buckets},
        # Neither of these two depends much on the kernels, so dealing's law will do for those without one.
        "predicted_step_cv": simulation.step_cv,
        "predicted_balance_efficiency": simulation.balance_efficiency,
        "shapes_per_step": shapes_side_by_side(schedule, schedule.num_update_steps),
        "token_share_distance": token_share_distance(schedule),
        "predicted": predicted,
        **lanes,
    }


def lanes_of(plan: BucketPlan, schedule: EpochSchedule, cost: CostModel) -> dict:
    """What lanes_picture.py draws of a measured arm, as the law has it: seconds of micro-batches, moments of ranks."""
    seconds = cost.seconds(schedule.sizes, schedule.tokens)
    ends = np.cumsum(seconds.reshape(-1, schedule.world_size).max(axis=1))
    starts = [0.0, *ends.round(4).tolist()]
    return {"micro_batches": listed(plan, schedule, seconds), "starts": [starts] * schedule.world_size}


def listed(plan: BucketPlan, schedule: EpochSchedule, seconds: np.ndarray) -> list[list]:
    """[shape, B, seconds] of every micro-batch, in schedule order."""
    shapes = [str(plan.buckets[bucket].shape) for bucket in schedule.bucket]
    lines = zip(shapes, schedule.sizes.tolist(), seconds.flatten().tolist())
    return [[shape, size, round(each, 6)] for shape, size, each in lines]
