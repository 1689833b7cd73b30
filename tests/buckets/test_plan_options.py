"""Is an option that nothing would follow refused, wherever plans are made?"""

import pytest
from support.measured import make_config

from adaptiveload_hf import UserError
from adaptiveload_hf.buckets.cost import Additive, MemoryModel
from adaptiveload_hf.buckets.plan import make_plan
from adaptiveload_hf.buckets.shapes import LatentShape

COST, MEMORY = Additive(0.01, 0.0, 1e-4, 1e-8), MemoryModel(1.0, 1e-3)
COUNTS = {LatentShape(1, 8, 8): 100, LatentShape(5, 8, 8): 100}
FIXED = {"policy": "fixed", "batch_sizes": {"1x8x8": 1, "5x8x8": 1}}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"token_budget": 100}, "token_budget"),
        ({"policy": "equal_time", "token_budget": 100}, "token_budget"),
        ({"policy": "equal_token", "target_seconds": "nonsense"}, "target_seconds"),
        ({**FIXED, "target_seconds": 3.0, "token_budget": 7}, "target_seconds, token_budget"),
        ({"memory": MEMORY, "memory_limit_gib": 50.0, "m_mem_tokens": 160}, "m_mem_tokens"),
    ],
)
def test_an_option_that_nothing_follows_is_refused(options, named):
    with pytest.raises(UserError, match=f"Nothing would follow {named}: policies 'dual' and 'equal_time' have target"):
        make_plan(COUNTS, COST, world_size=2, **options)


@pytest.mark.parametrize(
    "options",
    [{"policy": "equal_token"}, {"target_seconds": 2.0}, {"samples_per_step": 0}, {"samples_per_step": "many"}],
)
def test_samples_per_step_beside_what_it_cannot_steer_is_refused(options):
    with pytest.raises(UserError, match="samples_per_step is a number above 0 by which policy 'dual' chooses"):
        make_plan(COUNTS, COST, world_size=2, **{"samples_per_step": 20, **options})


def test_an_option_that_its_policy_has_is_followed():
    sizes = {}
    for name, options in {
        "dual": {"target_seconds": 0.02, "m_mem_tokens": 800},
        "equal_time": {"target_seconds": 0.02, "m_mem_tokens": 800},
        "equal_token": {"token_budget": 160},
    }.items():
        made = make_plan(COUNTS, COST, policy=name, world_size=2, **options)
        sizes[name] = [bucket.batch_size for bucket in made.buckets]
    assert sizes == {"dual": [6, 1], "equal_time": [6, 1], "equal_token": [10, 2]}


def test_a_comparison_steers_by_seconds_only_the_policies_that_have_them():
    shapes = {LatentShape(1, 60, 104): 300, LatentShape(21, 60, 104): 40}
    options = {"world_sizes": [4], "balances": ["none"], "policies": ["equal_token", "dual", "equal_time"]}
    steered = make_config().compare(shapes, target_seconds=3.0, **options)
    assert [row.plan.target_seconds for row in steered] == [None, 3.0, 3.0]
    assert steered[0].plan == make_config().compare(shapes, **options)[0].plan


def test_of_thousands_of_shapes_a_message_names_the_first():
    shapes = {LatentShape(frames, 60, 104): 10 for frames in range(1, 3001)}
    with pytest.raises(UserError) as refused:
        make_plan(shapes, COST, MEMORY, world_size=2, memory_limit_gib=20.0, measured_tokens=(1560, 1560))
    assert "2x60x104 (S = 3120), 3x60x104 (S = 4680)" in str(refused.value)
    assert str(refused.value).count("60x104") == 8 and "2,991 more" in str(refused.value)
    with pytest.raises(UserError, match=r"Infeasible under 20.0 GiB: .*; 2,9\d\d more\. Drop"):
        make_plan(shapes, COST, MEMORY, world_size=2, memory_limit_gib=20.0)
