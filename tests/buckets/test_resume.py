"""A resumed epoch trains exactly on what is left, under the same or any other world, accumulation and plan."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bucketed import COST, fixed_plan, mixed_index, real, segment

from adaptiveload_hf.buckets.cost import PowerLaw
from adaptiveload_hf.buckets.schedule import schedule_epoch
from adaptiveload_hf.errors import UserError

COUNTS = (40, 21, 13, 9, 4)
INDEX = mixed_index(COUNTS)


class Setting:
    def __init__(self, world_size, accumulation, batch_sizes, balance="auto", cost=COST):
        self.plan = fixed_plan(COUNTS, batch_sizes, world_size, accumulation)
        self.options = {
            "world_size": world_size,
            "gradient_accumulation_steps": accumulation,
            "balance": balance,
        }
        self.cost = cost

    def schedule(self, segments=(), **options):
        return schedule_epoch(
            INDEX.bucket_of_sample, self.plan, self.cost, segments=segments, **{**self.options, **options}
        )

    def segment(self, schedule, update_steps):
        """The first update_steps not yet done of a schedule, or as many as there are."""
        accumulation = schedule.gradient_accumulation_steps
        left = schedule.num_micro_steps - schedule.first_micro_step
        return segment(schedule, self.plan, min(update_steps * accumulation, left), self.cost)


def trained(schedule, micro_steps):
    """Samples that count in micro-steps from first_micro_step on."""
    first, last = (schedule.world_size * (schedule.first_micro_step + step) for step in (0, micro_steps))
    counts = np.repeat(real(schedule)[first:last], schedule.sizes[first:last])
    return schedule.sample_order[schedule.offsets[first] : schedule.offsets[last]][counts]


def occurrences(schedule, first=0, last=None):
    """(sample, how often it is still to come) in these micro-steps, but for padding."""
    pairs = []
    for step in range(first, last or schedule.num_micro_steps):
        for rank in range(schedule.world_size):
            if schedule.loss_weight[step * schedule.world_size + rank] > 0:
                pairs += zip(schedule.micro_batch(step, rank).tolist(), schedule.occurrences(step, rank).tolist())
    return pairs


SETTINGS = st.builds(
    Setting,
    st.integers(1, 4),
    st.integers(1, 3),
    st.tuples(*[st.integers(1, 6)] * len(COUNTS)),
    st.sampled_from(["none", "step", "stratified:2", "window:2", "auto"]),
    st.sampled_from([COST, PowerLaw(0.1, 1e-3, 1.3)]),
)


@settings(max_examples=80, deadline=None)
@given(SETTINGS, st.integers(1, 40), st.integers(0, 2))
def test_under_the_same_setting_the_rest_of_the_same_order_follows(setting, update_steps, epoch):
    whole = setting.schedule(epoch=epoch)
    part = setting.segment(whole, update_steps)
    resumed = setting.schedule([part], epoch=epoch)
    assert resumed.digest == whole.digest
    assert resumed.first_micro_step == part["micro_steps"]
    assert np.array_equal(resumed.loss_weight, whole.loss_weight)
    assert np.array_equal(resumed.unseen(), whole.unseen()[len(trained(whole, part["micro_steps"])) :])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(SETTINGS, st.integers(1, 4)), min_size=2, max_size=20),
    st.sampled_from([None, 0.5, 2.5]),
    st.integers(0, 9),
)
def test_through_any_chain_of_settings_nothing_is_lost_and_nothing_seen_twice(chain, most_repeats, epoch):
    repeats = None if most_repeats is None else np.random.default_rng(epoch).uniform(0.3, most_repeats, sum(COUNTS))
    options = {"repeats": repeats, "epoch": epoch, "seed": epoch + 1}
    due = chain[0][0].schedule(**options).unseen()
    segments, ledger = [], []
    for setting, update_steps in chain:
        schedule = setting.schedule(segments, **options)
        assert len(schedule.bucket) % (schedule.world_size * schedule.gradient_accumulation_steps) == 0
        part = setting.segment(schedule, update_steps)
        ledger.extend(trained(schedule, part["micro_steps"]))
        if schedule.first_micro_step:
            part["micro_steps"] += schedule.first_micro_step
            segments[-1] = part
        else:
            segments.append(part)
        if part["micro_steps"] == schedule.num_micro_steps:
            break
    else:
        ledger.extend(chain[-1][0].schedule(segments, **options).unseen())
    assert sorted(ledger) == sorted(due)
    assert repeats is not None or sorted(ledger) == list(range(sum(COUNTS)))


def test_repeated_samples_are_resumed_as_often_as_they_are_due():
    repeats = np.random.default_rng(0).uniform(0, 2.5, sum(COUNTS))
    first, second = Setting(3, 2, (6, 4, 2, 1, 1)), Setting(2, 1, (2, 2, 2, 1, 1))
    whole = first.schedule(repeats=repeats)
    part = first.segment(whole, 3)
    rest = second.schedule([part], repeats=repeats)
    found = np.concatenate([trained(whole, part["micro_steps"]), rest.unseen()])
    assert sorted(found) == sorted(whole.unseen())
    due = [(sample, k) for sample, times in enumerate(np.bincount(found)) for k in range(times)]
    assert max(due, key=lambda pair: pair[1])[1] == 2
    assert sorted(occurrences(whole)) == due
    assert sorted(occurrences(whole, 0, part["micro_steps"]) + occurrences(rest)) == due, "an occurrence came twice"


def test_fewer_samples_left_than_an_optimizer_step_needs_are_filled_with_padding_of_weight_zero():
    first, second = Setting(1, 1, (1, 1, 1, 1, 1)), Setting(4, 4, (4, 4, 4, 4, 1))
    whole = first.schedule()
    rest = second.schedule([first.segment(whole, sum(COUNTS) - 3)])
    assert rest.num_update_steps == 1
    assert real(rest).sum() == 3 and (rest.loss_weight == 0).sum() == 13
    assert sorted(rest.unseen()) == sorted(whole.sample_order[-3:])


def test_balance_auto_goes_on_with_the_mode_it_had_chosen():
    auto = Setting(3, 2, (6, 4, 2, 1, 1))
    whole = auto.schedule()
    assert auto.schedule([auto.segment(whole, 2)]).balance == whole.balance
    other = "none" if whole.balance != "none" else "step"
    resumed = Setting(3, 2, (6, 4, 2, 1, 1), other).schedule([auto.segment(whole, 2)])
    assert resumed.balance == other and resumed.first_micro_step == 0


def test_an_order_that_cannot_be_rebuilt_is_refused():
    setting = Setting(2, 2, (4, 4, 2, 1, 1))
    part = setting.segment(setting.schedule(), 2)
    with pytest.raises(UserError, match="order of a checkpoint could not be rebuilt"):
        setting.schedule([part], seed=1)
    with pytest.raises(UserError, match="order of a checkpoint could not be rebuilt"):
        setting.schedule([part], repeats=np.full(sum(COUNTS), 1.5))


def test_a_segment_that_ends_inside_an_optimizer_step_or_after_the_epoch_is_refused():
    setting = Setting(2, 2, (4, 4, 2, 1, 1))
    part = setting.segment(setting.schedule(), 2)
    for micro_steps in (3, 1000, -2):
        with pytest.raises(UserError, match="The checkpoint is damaged"):
            setting.schedule([{**part, "micro_steps": micro_steps}])


def test_an_epoch_that_is_over_cannot_be_dealt_anew():
    setting = Setting(2, 2, (4, 4, 2, 1, 1))
    part = setting.segment(setting.schedule(), 1000)
    with pytest.raises(UserError, match="already cover the whole epoch"):
        Setting(3, 1, (4, 4, 2, 1, 1)).schedule([part])
