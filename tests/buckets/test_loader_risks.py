"""What a loader says on the main process before training begins with a plan that may fail."""

import warnings

import pytest
import torch
from accelerate import Accelerator
from support.accelerators import fresh_accelerate
from support.bucketed import NumberedRows
from support.measured import BATCH_SIZES, ENVIRONMENT, fit_config, make_config, measure

from adaptiveload_hf import BucketConfig, BucketDataLoader, index_shapes

SIZES = [[1, 60, 104]] * 20 + [[21, 60, 104]] * 50
HERE = {**ENVIRONMENT, "strategy": "single"}


@pytest.fixture
def said():
    def said(config, cpu=True, **options):
        with fresh_accelerate(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            BucketDataLoader(
                NumberedRows(70), config, accelerator=Accelerator(cpu=cpu), shapes=index_shapes(SIZES), **options
            )
        return [str(each.message) for each in caught if each.filename == __file__]

    return said


def counted(**options):
    import diffusers

    model = diffusers.WanTransformer3DModel(num_layers=1, num_attention_heads=2, attention_head_dim=12, ffn_dim=32)
    return BucketConfig.from_flops(model, **options)


def test_a_plan_that_fits_where_it_was_measured_is_used_without_a_word(said):
    assert said(make_config(HERE)) == []
    assert said(counted(batch_sizes=dict.fromkeys(BATCH_SIZES, 1))) == []


def test_batch_sizes_over_the_memory_limit_are_said(said):
    over = {"batch_sizes": {"21x60x104": 50}}
    assert said(make_config(HERE), **over) == ["Over the memory limit: 21x60x104."]
    (unknown,) = said(fit_config(measure(memory=False), environment={}), **over)
    assert unknown.endswith("tokens, and these may not: 21x60x104.")


def test_a_plan_that_nothing_limits_is_said(said):
    assert said(counted()) == ["No memory model or limit: nothing keeps a micro-batch from running out of memory."]


def test_another_strategy_than_the_measured_is_said(said):
    (found,) = said(make_config())
    assert "differ: strategy: measured with fsdp2, here single. Measure as you train, or give memory" in found


@pytest.mark.gpu
def test_another_gpu_than_the_measured_is_said(said):
    (found,) = said(make_config({**HERE, "gpu": "another"}), cpu=False)
    assert f"differ: gpu: measured with another, here {torch.cuda.get_device_name()}. Measure as you train" in found


def test_other_ranks_than_the_main_process_say_nothing(said, monkeypatch):
    monkeypatch.setattr(Accelerator, "is_main_process", False)
    assert said(make_config()) == []


def test_a_checkpoint_of_a_plan_with_risks_is_plain_values():
    with fresh_accelerate(), pytest.warns(UserWarning, match="No memory model"):
        loader = BucketDataLoader(
            NumberedRows(70), counted(), accelerator=Accelerator(cpu=True), shapes=index_shapes(SIZES)
        )
    assert any(type(finding) is not str for finding in loader.plan.findings)
    assert {type(finding) for finding in loader.plan.to_dict()["findings"]} == {str}
