"""What must hold for every schedule: nothing lost, nothing twice, equal work for all ranks, exact loss weights."""

import subprocess
import sys
import time
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bucketed import COST, fixed_plan, mixed_index, real

from adaptiveload_hf.buckets.deal import matched_efficiency
from adaptiveload_hf.buckets.schedule import count_update_steps, schedule_epoch
from adaptiveload_hf.errors import UserError

BALANCES = ["none", "step", "stratified:3", "window:2", "window:3", "window:8", "auto"]


class Job(NamedTuple):
    counts: tuple
    batch_sizes: tuple
    world_size: int
    accumulation: int

    @property
    def group(self):
        return self.world_size * self.accumulation

    @property
    def plan(self):
        return fixed_plan(self.counts, self.batch_sizes, self.world_size, self.accumulation)

    @property
    def run(self):
        return {"world_size": self.world_size, "gradient_accumulation_steps": self.accumulation}

    def schedule(self, **options):
        return schedule_epoch(mixed_index(self.counts).bucket_of_sample, self.plan, COST, **{**self.run, **options})


@st.composite
def jobs(draw):
    buckets = draw(st.integers(1, 6))
    counts = tuple(draw(st.lists(st.integers(0, 60), min_size=buckets, max_size=buckets)))
    sizes = tuple(draw(st.lists(st.integers(1, 12), min_size=buckets, max_size=buckets)))
    world_size, accumulation = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    short = max(0, world_size * accumulation - sum(counts))
    return Job((counts[0] + short, *counts[1:]), sizes, world_size, accumulation)


JOB = Job((400, 90, 61, 30, 9, 5), (16, 8, 4, 2, 1, 1), 4, 2)


def seen(schedule):
    """Sample indices that count, in schedule order."""
    return schedule.sample_order[np.repeat(real(schedule), schedule.sizes)]


def efficiency(schedule):
    by_step = schedule.cost.reshape(-1, schedule.world_size)
    return by_step.mean(axis=1).sum() / by_step.max(axis=1).sum()


@settings(max_examples=200, deadline=None)
@given(jobs(), st.integers(0, 3), st.integers(0, 3), st.sampled_from(BALANCES))
def test_every_sample_is_in_exactly_one_micro_batch_of_its_bucket(job, seed, epoch, balance):
    schedule = job.schedule(seed=seed, epoch=epoch, balance=balance)
    index = mixed_index(job.counts)
    assert np.array_equal(np.sort(seen(schedule)), np.arange(sum(job.counts)))
    owner = np.repeat(schedule.bucket, schedule.sizes)
    assert np.array_equal(index.bucket_of_sample[schedule.sample_order], owner)
    assert (schedule.sizes >= 1).all()
    assert (schedule.sizes <= np.array(job.batch_sizes)[schedule.bucket]).all()
    tokens = np.array([bucket.tokens for bucket in job.plan.buckets])
    assert np.array_equal(schedule.tokens, tokens[schedule.bucket])
    assert np.allclose(schedule.cost, COST.seconds(schedule.sizes, schedule.tokens))


@settings(max_examples=200, deadline=None)
@given(jobs(), st.sampled_from(BALANCES))
def test_every_rank_has_the_same_whole_number_of_optimizer_steps(job, balance):
    schedule = job.schedule(balance=balance)
    assert len(schedule.bucket) == schedule.num_micro_steps * job.world_size
    assert len(schedule.bucket) == schedule.num_update_steps * job.group
    assert schedule.num_update_steps == count_update_steps(
        mixed_index(job.counts).bucket_of_sample, job.plan, COST, **job.run
    )
    batches = [list(schedule.rank_batches(rank, 0)) for rank in range(job.world_size)]
    assert {len(b) for b in batches} == {schedule.num_micro_steps}
    assert np.array_equal(np.concatenate([b for step in zip(*batches) for b in step]), schedule.sample_order)


@settings(max_examples=150, deadline=None)
@given(jobs())
def test_a_bucket_is_cut_into_sizes_that_differ_by_at_most_one(job):
    schedule = job.schedule()
    for bucket in range(len(job.counts)):
        sizes = schedule.sizes[(schedule.bucket == bucket) & real(schedule)]
        assert sizes.size == 0 or sizes.max() - sizes.min() <= 1


@settings(max_examples=200, deadline=None)
@given(jobs())
def test_padding_is_used_only_where_no_micro_batch_can_be_split(job):
    schedule = job.schedule()
    padding = ~real(schedule)
    if padding.any():
        assert (schedule.sizes == 1).all()
        assert padding.sum() < job.group
        assert schedule.cost[padding].max() <= schedule.cost.min()
    else:
        fewest = sum(-(-n // b) for n, b in zip(job.counts, job.batch_sizes))
        assert len(schedule.bucket) - fewest < job.group


@settings(max_examples=100, deadline=None)
@given(jobs(), st.sampled_from(BALANCES), st.integers(0, 5))
def test_the_schedule_is_a_function_of_its_arguments_alone(job, balance, seed):
    np.random.seed(seed)
    one = job.schedule(balance=balance, seed=seed)
    two = job.schedule(balance=balance, seed=seed)
    assert one.digest == two.digest
    assert np.array_equal(one.loss_weight, two.loss_weight)


def test_epochs_and_seeds_differ():
    digests = {JOB.schedule(seed=seed, epoch=epoch).digest for seed in range(3) for epoch in range(3)}
    assert len(digests) == 9


def contents(schedule, steps=1):
    """The micro-batches of every `steps` optimizer steps, as sets of sample tuples."""
    batches = [tuple(sorted(batch)) for batch in np.split(schedule.sample_order, schedule.offsets[1:-1])]
    length = steps * schedule.world_size * schedule.gradient_accumulation_steps
    return [set(batches[first : first + length]) for first in range(0, len(batches), length)]


def test_balance_step_leaves_the_contents_of_every_optimizer_step_unchanged():
    assert contents(JOB.schedule(balance="step")) == contents(JOB.schedule(balance="none"))


@pytest.mark.parametrize("balance", ["window:3", "stratified:3"])
def test_a_window_moves_micro_batches_within_itself_only(balance):
    none, window = JOB.schedule(balance="none"), JOB.schedule(balance=balance)
    assert none.num_update_steps % 3, "the last window should be a short one here"
    assert contents(window, 3) == contents(none, 3)
    assert contents(window, 1) != contents(none, 1)


@settings(max_examples=60, deadline=None)
@given(jobs(), st.integers(0, 9))
def test_each_wider_window_is_at_least_as_even(job, seed):
    found = [efficiency(job.schedule(balance=b, seed=seed)) for b in ("none", "step", "window:2", "window:4")]
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(found))


def test_auto_takes_the_most_even_mode_near_the_wanted_efficiency_and_no_window_of_over_an_eighth_of_the_epoch():
    for job in (JOB, JOB._replace(world_size=8, accumulation=1), JOB._replace(world_size=2, accumulation=4)):
        chosen = job.schedule(balance="auto")
        spans = (2, 4, 8, 16)
        modes = ["step", *(f"stratified:{n}" for n in spans if job.accumulation > 1)]
        modes += [f"window:{n}" for n in spans if 8 * n <= chosen.num_update_steps]
        cost = job.schedule(balance="none").cost
        found = {mode: matched_efficiency(cost, job.world_size, job.accumulation, mode) for mode in modes}
        for mode in modes:
            assert efficiency(job.schedule(balance=mode)) == pytest.approx(found[mode], abs=0.01)
        reaching = [mode for mode in found if found[mode] >= 0.95]
        best = found[reaching[0]] if reaching else max(found.values())
        assert chosen.balance == next(mode for mode in found if best / found[mode] <= 1.01)
        assert chosen.findings == ()
        assert chosen.digest == job.schedule(balance=chosen.balance).digest


def test_a_window_of_over_an_eighth_of_the_epoch_is_a_finding():
    job = Job((64, 32), (1, 1), 3, 2)
    assert job.schedule(balance="window:2").num_update_steps == 16
    assert job.schedule(balance="window:2").findings == ()
    (finding,) = job.schedule(balance="window:3").findings
    assert finding.startswith("Balance window:3 sorts much of the epoch by cost: it has 16 optimizer steps. ")
    one_step = Job((6,), (1,), 3, 2)
    assert one_step.schedule(balance="step").findings == () == one_step.schedule(balance="none").findings
    assert one_step.schedule(balance="auto").balance == "step"


def test_no_rank_is_always_the_slowest():
    for balance in ("step", "window:4"):
        schedule = JOB.schedule(balance=balance)
        slowest = schedule.cost.reshape(-1, JOB.world_size).argmax(axis=1)
        assert set(slowest) == set(range(JOB.world_size))


def step_losses(schedule, losses):
    """Per optimizer step: mean over each micro-batch, weighted, mean over ranks, divided by K."""
    means = np.array([losses[batch].mean() for batch in np.split(schedule.sample_order, schedule.offsets[1:-1])])
    group = schedule.world_size * schedule.gradient_accumulation_steps
    return (schedule.loss_weight * means).reshape(-1, group).mean(axis=1)


@settings(max_examples=100, deadline=None)
@given(jobs(), st.sampled_from(BALANCES))
def test_token_weights_give_the_token_mean_of_every_optimizer_step(job, balance):
    schedule = job.schedule(balance=balance, loss_normalization="token")
    losses = np.random.default_rng(0).normal(size=sum(job.counts))
    tokens = np.array([bucket.tokens for bucket in job.plan.buckets])[mixed_index(job.counts).bucket_of_sample]
    for step, found in enumerate(step_losses(schedule, losses)):
        part = slice(*(schedule.offsets[[step * job.group, (step + 1) * job.group]]))
        counted = np.repeat(real(schedule), schedule.sizes)[part]
        samples = schedule.sample_order[part][counted]
        assert found == pytest.approx(np.average(losses[samples], weights=tokens[samples]), abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(jobs(), st.sampled_from(BALANCES))
def test_sample_weights_give_every_sample_of_an_epoch_the_same_weight(job, balance):
    schedule = job.schedule(balance=balance, loss_normalization="sample")
    losses = np.random.default_rng(0).normal(size=sum(job.counts))
    expected = sum(job.counts) / schedule.num_update_steps
    assert step_losses(schedule, losses).sum() == pytest.approx(losses.sum() / expected, abs=1e-9)


def test_no_normalization_leaves_losses_alone():
    schedule = JOB.schedule(loss_normalization="none")
    assert set(schedule.loss_weight[real(schedule)]) == {1.0}


def test_repeats_are_rounded_to_a_neighbour_and_to_an_exact_total():
    counts = (300, 100, 50)
    random = np.random.default_rng(0)
    repeats = np.round(random.uniform(0, 3, sum(counts)), 2)
    job = Job(counts, (8, 4, 2), 2, 2)
    total = np.zeros(sum(counts))
    for epoch in range(60):
        found = np.bincount(seen(job.schedule(repeats=repeats, epoch=epoch)), minlength=sum(counts))
        assert ((found == np.floor(repeats)) | (found == np.ceil(repeats))).all()
        assert found.sum() == round(repeats.sum())
        total += found
    # A binomial mean of 60 draws strays by less than 5 standard deviations.
    assert np.abs(total / 60 - repeats).max() < 5 * 0.5 / 60**0.5


def test_whole_repeats_are_exact():
    repeats = np.array([0, 1, 2, 3] * 10, dtype=float)
    found = np.bincount(seen(Job((30, 10), (4, 2), 2, 1).schedule(repeats=repeats)), minlength=40)
    assert found.tolist() == repeats.tolist()


EDGES = {
    "one bucket and a batch size beyond it": (Job((37,), (10**9,), 3, 2), None, {6, 7}),
    "as many samples as ranks and micro-steps": (Job((5, 4, 3), (10**9, 2, 1), 4, 3), None, {1}),
    "buckets without samples": (Job((0, 20, 0, 8, 0), (4, 3, 2, 1, 1), 2, 1), None, {1, 3, 2}),
    "every other sample left out": (Job((40, 20), (4, 2), 2, 2), 0.5, {1, 2, 3, 4}),
    "one rank and no accumulation": (Job((9, 2), (4, 4), 1, 1), None, {3, 2}),
    "one sample": (Job((1,), (64,), 1, 1), None, {1}),
    "a last window of one step": (Job((50,), (1,), 2, 1), None, {1}),
}


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("edge", EDGES)
def test_edges_are_dealt_whole(edge, balance):
    job, repeat, sizes = EDGES[edge]
    samples = sum(job.counts)
    repeats = None if repeat is None else np.full(samples, repeat)
    schedule = job.schedule(balance=balance, repeats=repeats)
    assert set(schedule.sizes.tolist()) <= sizes
    found = np.bincount(seen(schedule), minlength=samples)
    assert found.max() == 1 and found.sum() == (samples if repeat is None else round(samples * repeat))
    assert len(schedule.bucket) == schedule.num_update_steps * job.group
    counted = count_update_steps(mixed_index(job.counts).bucket_of_sample, job.plan, COST, **job.run, repeats=repeats)
    assert schedule.num_update_steps == counted


@pytest.mark.parametrize(
    ("balance", "digest"),
    [
        ("none", "74cabafc676b04daee9f73da5078920c"),
        ("step", "335ce495cee30a4c0c0b59cf2d883093"),
        ("stratified:3", "c90726946c70b5120158c7639c2687fc"),
        ("window:3", "5a00e17fb463b7a2aeaed41d197eb957"),
    ],
)
def test_orders_of_earlier_versions_are_still_made(balance, digest):
    """A checkpoint inside an epoch can be resumed only as long as this holds: a change here must be on purpose."""
    repeats = np.linspace(0.5, 1.5, sum(JOB.counts))
    assert JOB.schedule(seed=3, epoch=2, balance=balance, repeats=repeats).digest == digest


def test_schedules_need_no_torch():
    code = "import sys, adaptiveload_hf.buckets.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_too_few_samples_for_an_optimizer_step_are_refused():
    for repeats in (None, np.zeros(0)):
        with pytest.raises(UserError, match="the dataset gives 0 samples"):
            schedule_epoch(np.zeros(0, int), fixed_plan([11], [2], 1, 1), COST, world_size=1, repeats=repeats)
    with pytest.raises(UserError, match="4 ranks x 3 micro-steps, but the dataset gives 11 samples"):
        schedule_epoch(
            np.zeros(11, int), fixed_plan([11], [2], 1, 1), COST, world_size=4, gradient_accumulation_steps=3
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance": "window:0"}, "balance is none, step, stratified:n"),
        ({"balance": "best"}, "found 'best'"),
        ({"loss_normalization": "tokens"}, "loss_normalization is one of"),
        ({"world_size": 0}, "must be at least 1 and whole, but found 0 and "),
        ({"gradient_accumulation_steps": 1.5}, "and 1.5"),
        ({"balance": None}, "found None"),
        ({"seed": -1}, "seed and epoch are whole numbers from 0 on, but found -1 and 0"),
        ({"epoch": 1.5}, "found 0 and 1.5"),
        ({"repeats": ["a"] * 595}, "repeats must be 595 numbers"),
        ({"repeats": np.ones(3)}, "repeats must be 595 numbers"),
        ({"repeats": -np.ones(595)}, "repeats must be 595 numbers"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        JOB.schedule(**options)


def test_samples_of_no_bucket_of_the_plan_are_refused():
    with pytest.raises(UserError, match=r"must lie in 0..1, the plan's buckets, but it spans 0..5"):
        schedule_epoch(mixed_index(JOB.counts).bucket_of_sample, fixed_plan([9, 9], [2, 2], 1, 1), COST, world_size=1)


def test_the_next_batch_of_a_large_epoch_costs_microseconds():
    job = Job((300_000, 100_000, 50_000), (64, 16, 4), 64, 4)
    schedule = job.schedule()
    start = time.perf_counter()
    batches = sum(1 for _ in schedule.rank_batches(7, 0))
    assert (time.perf_counter() - start) / batches < 50e-6
