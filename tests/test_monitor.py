"""Does TrainingMonitor read the right numbers from a live run, the same on all ranks?"""

import copy
import pickle
import re
import warnings

import numpy as np
import pytest
import torch
from support import monitored
from support.accelerators import FSDP2, fresh_accelerate
from support.image_training import image_loader, losses
from support.tiny_models import tiny_inputs, tiny_model
from support.worlds import on_ranks
from typer.main import get_command

from adaptiveload_hf import TrainingMonitor, UserError, cli, make_accelerator
from adaptiveload_hf.monitor import BlockClock, CostDrift, RankPace, device_counters, repeated_block


@pytest.fixture(scope="module")
def unbalanced():
    return on_ranks(2, monitored.train, None, **FSDP2)


@pytest.mark.distributed
def test_every_rank_reads_the_same_loss_and_sums_of_all_ranks(unbalanced):
    first, second = unbalanced
    for one, other in zip(first["steps"], second["steps"], strict=True):
        assert one["loss"] == other["loss"]
        assert one["micro_batches"] == other["micro_batches"]
    losses = np.mean([first["losses"], second["losses"]], axis=0).reshape(-1, 2).mean(1)
    assert np.allclose([step["loss"] for step in first["steps"]], losses, rtol=1e-6)
    assert sum(step["samples"] for step in first["steps"]) == 2 * sum(monitored.COUNTS)
    assert sum(step["seconds"] for step in first["steps"]) == pytest.approx(first["seconds"], rel=0.1)


@pytest.mark.distributed
def test_a_flag_of_one_rank_is_heard_by_all_at_the_same_step(unbalanced):
    for rank in unbalanced:
        assert [number for number, step in enumerate(rank["steps"]) if step["flag"]] == [3]


@pytest.mark.distributed
def test_compute_in_a_block_shows_the_imbalance_that_wall_seconds_hide(unbalanced):
    first, second = (rank["steps"] for rank in unbalanced)
    assert "measured_balance_efficiency" not in first[0]
    uneven = [i for i, step in enumerate(first[:-1]) if step["balance_efficiency"] < 0.8]
    assert uneven
    walls = [abs(first[i]["seconds"] / second[i]["seconds"] - 1) for i in uneven]
    measured = [first[i + 1]["measured_balance_efficiency"] for i in uneven]
    assert np.median(walls) < 0.05
    assert np.median(measured) < 0.85


@pytest.mark.distributed
def test_a_rank_that_lags_for_the_same_work_is_named_once():
    first, second = on_ranks(2, monitored.train, 1)
    for rank in (first, second):
        findings = [text for step in rank["steps"] for text in step["findings"] if "process" in text]
        assert len(findings) == 1
        assert findings[0].startswith("process 1 takes ")
        assert "nvidia-smi" in findings[0]


@pytest.mark.distributed
def test_a_wait_for_data_of_any_rank_is_a_wait_of_all_and_in_no_finding():
    first, second = on_ranks(2, monitored.train, None, 0.1, **FSDP2)
    for one, other in zip(first["steps"], second["steps"], strict=True):
        assert one["data_wait_seconds"] == pytest.approx(other["data_wait_seconds"], rel=0.2)
        assert 0.2 <= one["data_wait_seconds"] <= one["seconds"], "each rank waited 0.1 s, at different micro-steps"
    assert not [
        text for rank in (first, second) for step in rank["steps"] for text in step["findings"] if "refit" in text
    ]


@pytest.mark.distributed
def test_nothing_stays_on_the_model_and_the_line_names_the_units(unbalanced):
    assert [rank["hooks"] for rank in unbalanced] == [rank["hooks_before"] for rank in unbalanced]
    line = unbalanced[0]["steps"][-1]["line"]
    for part in ("loss ", " samples/s | ", " tokens/s/rank | ", "data wait "):
        assert part in line
    assert re.search(r" \| \d+\.\d\d s \(predicted \d\.\d\d\) \| .* \| balance efficiency [01]\.\d{3} \| ", line)
    line = unbalanced[0]["steps"][-1]["line_of_counted"]
    assert "predicted" not in line and re.search(r" \| balance efficiency [01]\.\d{3} \| ", line)


SHAPES = ["1x4x4", "5x4x4", "9x4x4"]
COST = [1.0, 2.0, 4.0]


def steps_of(drift, seconds_of, steps=60):
    """Steps of one micro-step on one rank, shapes in turn; what is found in all."""
    found = []
    for step in range(steps):
        found += drift.update(seconds_of(step), [SHAPES[step % 3]], [COST[step % 3]])
    return found


def test_steps_that_take_what_was_predicted_drift_nowhere():
    assert steps_of(CostDrift(True), lambda step: COST[step % 3] * (1.1 if step % 2 else 0.9)) == []


def test_the_first_steps_and_the_first_of_a_shape_may_take_what_they_take():
    assert steps_of(CostDrift(True), lambda step: 100 if step < 3 else COST[step % 3]) == []
    of_one_shape = CostDrift(True)
    for step in range(60):
        assert of_one_shape.update(9 if step < 3 else 1, SHAPES[:1], COST[:1]) == []


def test_a_bucket_that_takes_more_than_its_share_is_named_once_with_the_command():
    (finding,) = steps_of(CostDrift(True), lambda step: COST[step % 3] * (1.4 if step % 3 == 0 else 1), 120)
    assert finding.startswith("bucket 1x4x4 takes 1.3")
    command = re.search("`adaptiveload (.*)`", finding)[1]
    with get_command(cli.app).make_context("adaptiveload", command.split()) as context:
        verb, _, words = context.command.resolve_command(context, command.split())
        assert verb == "fit" and context.command.get_command(context, verb).make_context(verb, words)


def test_a_run_that_is_slower_as_a_whole_is_named_once_where_seconds_were_predicted():
    (finding,) = steps_of(CostDrift(True), lambda step: 1.5 * COST[step % 3])
    assert finding.startswith("steps take 1.50 times the predicted seconds")
    assert steps_of(CostDrift(False), lambda step: 1.5 * COST[step % 3]) == []


def test_the_hooks_of_a_monitor_go_with_it():
    model = tiny_model("sd3")
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        accelerator = make_accelerator()
        loader = image_loader(accelerator, (8, 8), (2, 2), balance="none")
        for _ in range(3):
            monitor = TrainingMonitor(accelerator, model, loader)
            next(iter(monitor))
            assert monitored.hooks_of(model) == 2
        del monitor
    assert monitored.hooks_of(model) == 0


def test_a_copy_of_a_watched_model_has_a_clock_of_its_own():
    model, clock = tiny_model("sd3"), BlockClock(on_gpu=False)
    clock.attach(repeated_block(model))
    copies = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
    for other in copies:
        clock.arm()
        other(**tiny_inputs("sd3"))
        assert clock.take() is None
    model(**tiny_inputs("sd3"))
    begin, end = clock.take()
    assert 0 < end - begin < 60


def test_a_recomputation_in_backward_is_not_timed():
    model, clock = tiny_model("sd3"), BlockClock(on_gpu=False)
    model.enable_gradient_checkpointing()
    clock.attach(repeated_block(model))
    clock.arm()
    output = model(**tiny_inputs("sd3")).sample
    first = clock.take()
    output.sum().backward()
    assert clock.take() is first


def test_a_list_within_a_block_is_not_the_list_of_blocks():
    model = tiny_model("wan")
    model.blocks = model.blocks[:1]
    assert len(model.blocks[0].ffn.net) > len(model.blocks)
    assert repeated_block(model) is model.blocks[0]


def test_blocks_that_are_compiled_or_missing_are_not_watched():
    model = tiny_model("sd3")
    assert repeated_block(model) is model.transformer_blocks[0]
    model.transformer_blocks[0].compile(backend="eager")
    assert repeated_block(model) is None
    assert repeated_block(torch.nn.Linear(2, 2)) is None


def test_a_model_that_is_compiled_as_a_whole_keeps_its_one_graph():
    blocks, clock = torch.nn.ModuleList([torch.nn.Linear(4, 4)]), BlockClock(on_gpu=False)
    model = torch.compile(torch.nn.Sequential(*blocks), backend="eager", fullgraph=True)
    clock.attach(blocks[0])
    for _ in range(2):
        clock.arm()
        model(torch.ones(2, 4))
        assert clock.take() is None


def test_a_loss_may_be_a_tensor_of_one_element():
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        accelerator = make_accelerator(gradient_accumulation_steps=2)
        monitor = TrainingMonitor(accelerator, None, image_loader(accelerator, (8, 8), (2, 2), balance="none"))
        for number, _ in enumerate(monitor):
            with accelerator.accumulate():
                metrics = monitor.micro_step_done(torch.tensor([1.0 + number]))
            if metrics is not None:
                break
    assert metrics["loss"] == 1.5


def pass_over(odd):
    """Losses of the steps of an epoch in which the main process passes over the micro-batches `odd`."""
    accelerator = make_accelerator(gradient_accumulation_steps=2)
    loader = image_loader(accelerator, (8, 8), (2, 2), balance="none")
    found = []
    for number, _ in enumerate(monitor := TrainingMonitor(accelerator, None, loader)):
        if number in odd and accelerator.is_main_process:
            found.append(monitor.micro_step_done(torch.tensor(0.0)))
            continue
        with accelerator.accumulate():
            found.append(monitor.micro_step_done(torch.tensor(1.0)))
    return [metrics and metrics["loss"] for metrics in found]


@pytest.mark.parametrize("odd", [(0, 4), (1,), (2, 3)])
def test_steps_end_where_the_schedule_says_whatever_the_loop_passes_over(odd):
    losses = [number not in odd for number in range(8)]
    means = [(first + second) / 2 for first, second in zip(losses[::2], losses[1::2])]
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        assert pass_over(odd) == [value for mean in means for value in (None, mean)]


@pytest.mark.distributed
def test_one_rank_may_pass_over_what_another_trains_on():
    first, second = on_ranks(2, pass_over, (0, 2))
    assert first == second == [None, 0.75, None, 0.75]


@pytest.mark.parametrize(("loss", "found"), [(1.5, "float"), (torch.ones(3), r"a tensor \[3\]")])
def test_a_loss_that_is_no_tensor_of_one_number_is_refused(loss, found):
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        accelerator = make_accelerator()
        monitor = TrainingMonitor(accelerator, None, image_loader(accelerator, (8, 8), (2, 2), balance="none"))
        next(iter(monitor))
        with pytest.raises(UserError, match=f"a tensor of one number, but found {found}. Pass what"):
            monitor.micro_step_done(loss)


@pytest.mark.parametrize(
    ("calls", "found"),
    [([], "none"), ([1], "none"), ([2], "one more"), ([1, 1, 1, 1], "one more"), ([1, 1, 0], "none")],
)
def test_a_batch_without_its_one_call_is_named_before_any_rank_waits_for_it(calls, found):
    """calls: of micro_step_done, for each batch until the mistake. The second ends an optimizer step."""
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        accelerator = make_accelerator(gradient_accumulation_steps=2)
        monitor = TrainingMonitor(accelerator, None, image_loader(accelerator, (8, 8), (2, 2), balance="none"))
        batches = iter(monitor)
        with pytest.raises(UserError, match=f"for each batch .*, but there was {found}\\. Call it also for a batch"):
            for times in calls:
                next(batches)
                with accelerator.accumulate():
                    for _ in range(times):
                        monitor.micro_step_done(torch.tensor(1.0))
            next(batches) if found == "none" else monitor.micro_step_done(torch.tensor(1.0))
            next(batches)
        batches.close()


def test_graphs_that_are_compiled_are_counted():
    before = device_counters()["recompiles"]
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    double(torch.ones(3))
    double(torch.ones(4))
    assert device_counters()["recompiles"] == before + 2


@pytest.mark.gpu
def test_the_monitor_waits_for_the_gpu_where_it_reads_the_loss_and_nowhere_else():
    waits = []
    with fresh_accelerate():
        accelerator = make_accelerator(gradient_accumulation_steps=2)
        model = accelerator.prepare(tiny_model("sd3"))
        loader = image_loader(accelerator, (8, 8), (2, 2), balance="none")
        monitor = TrainingMonitor(accelerator, model, loader)
        for batch in monitor:
            with accelerator.accumulate(model):
                loss = losses(model, batch).mean() * batch["loss_weight"]
                accelerator.backward(loss)
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                metrics = monitor.micro_step_done(loss)
            torch.cuda.set_sync_debug_mode("default")
            waits.append((metrics is not None, sum("synchronizing" in str(warning.message) for warning in said)))
    assert waits == 4 * [(False, 0), (True, 1)]


def test_one_process_lags_behind_nobody():
    pace = RankPace()
    for _ in range(50):
        pace.update(1.0, 2.0)
    assert pace.value == pytest.approx(0.5)
    assert pace.compare((0.5,)) == []


def test_of_several_processes_the_one_that_lags_is_named():
    pace = RankPace()
    for _ in range(50):
        pace.update(1.0, 2.0)
    assert pace.compare((0.50, 0.52, 0.48, 0.54)) == []
    (finding,) = pace.compare((0.50, 0.52, 0.66, 0.48))
    assert finding.startswith("process 2 takes 1.32 times as long")
    assert pace.compare((0.50, 0.52, 0.66, 0.48)) == []
