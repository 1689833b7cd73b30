"""Do all transformers of diffusers compute the same once they are patched?"""

import diffusers
import pytest
import torch
from support.model_configs import CASES, FIRST_CLASS, NO_ADALN, tiny_case, transformer_classes
from support.model_runs import RELEASE, TABLE, cast_inputs, forward, owners_with_sites, run, table
from support.tiny_models import relative_error

from adaptiveload_hf import UserError, patch_model, unpatch_model
from adaptiveload_hf.adaln.tested_sources import TESTED_SOURCES

# Nothing in them can be fused.
EAGER = [name for name in ("MiniMax-Music3",) if name in CASES]
PATCHED = [name for name in CASES if name not in EAGER]

# Their own code mixes in float32.
NOT_IN_FLOAT64 = ("Cosmos", "Cosmos ControlNet", "Kandinsky 5", "Motif-Video")
OTHERS = [name for name in PATCHED if name not in (*FIRST_CLASS, *NOT_IN_FLOAT64)]
SEEDS = 5
of_this_release = pytest.mark.skipif(diffusers.__version__ != RELEASE, reason=f"is about diffusers {RELEASE}")


def flat(tensors):
    return torch.cat([tensor.flatten().double() for tensor in tensors])


@pytest.mark.parametrize("name", PATCHED)
def test_a_patched_model_gives_the_outputs_and_gradients_of_the_unpatched_one(name):
    model, inputs = tiny_case(name)
    keys = list(model.state_dict())
    outputs, gradients = run(model, inputs)
    gradients = {name: gradient.clone() for name, gradient in gradients.items()}

    report = patch_model(model)
    found, found_gradients = run(model, inputs)
    assert not any("differed" in row["how"] for row in report.to_dict()["classes"]), str(report)
    assert list(model.state_dict()) == keys
    assert [output.dtype for output in found] == [output.dtype for output in outputs]
    assert relative_error(flat(found), flat(outputs)) < 1e-5
    assert found_gradients.keys() == gradients.keys()
    distant = [p for p, gradient in gradients.items() if relative_error(found_gradients[p], gradient) >= 1e-5]
    if distant:
        # Gradients that cancel (of key biases: to exactly 0) are rounding in both. Those must be as good as eager's.
        truth = run(tiny_case(name)[0].double(), cast_inputs(inputs, torch.float64))[1]
        largest = max(gradient.norm() for gradient in truth.values())
        for parameter in distant:
            patched_error, eager_error = (
                (g[parameter] - truth[parameter]).norm() for g in (found_gradients, gradients)
            )
            assert patched_error < max(1.5 * eager_error, 1e-7 * largest), parameter

    unpatch_model(model)
    restored, restored_gradients = run(model, inputs)
    assert all(map(torch.equal, restored, outputs))
    assert all(torch.equal(restored_gradients[parameter], gradients[parameter]) for parameter in gradients)


@pytest.mark.parametrize("name", [name for name in PATCHED if name not in NOT_IN_FLOAT64])
def test_what_the_ops_do_not_take_runs_as_written(name):
    model, inputs = tiny_case(name)
    model, inputs = model.double(), cast_inputs(inputs, torch.float64)
    with torch.no_grad():
        outputs = forward(model, inputs)
        patch_model(model, verify="never")
        assert all(map(torch.equal, forward(model, inputs), outputs))


@pytest.mark.parametrize("name", [*FIRST_CLASS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_in_bfloat16_a_patched_model_is_at_least_as_close_to_float64_as_eager(name):
    pairs = []
    for seed in range(SEEDS):
        model, inputs = tiny_case(name, seed)
        model, inputs = model.to(torch.bfloat16), cast_inputs(inputs, torch.bfloat16)
        truth = tiny_case(name, seed)[0].double()
        truth.load_state_dict(model.state_dict())
        exact = run(truth, cast_inputs(inputs, torch.float64))
        outputs, gradients = run(model, inputs)
        eager = errors(outputs, gradients, *exact)
        patch_model(model)
        found, found_gradients = run(model, inputs)
        assert [output.dtype for output in found] == [output.dtype for output in outputs]
        pairs.append(torch.stack([eager, errors(found, found_gradients, *exact)]))
    eager, fused = torch.stack(pairs, dim=1)
    # Roundings elsewhere differ too then, by chance: 2% and twice the standard error of the mean.
    slack = 0.02 * eager.mean(0) + 2 * (fused - eager).std(0) / SEEDS**0.5
    assert (fused.mean(0) <= eager.mean(0) + slack).all(), (fused.mean(0), eager.mean(0), slack)


def errors(outputs, gradients, true_outputs, true_gradients):
    """Relative errors of the outputs and of all gradients together."""
    pairs = (flat(outputs), flat(true_outputs)), (flat(gradients.values()), flat(true_gradients.values()))
    return torch.tensor([relative_error(value, truth) for value, truth in pairs])


@of_this_release
def test_the_table_in_the_docs_is_up_to_date():
    assert TABLE.read_text() == table(), "PYTHONPATH=tests python -m support.model_runs writes it"


@of_this_release
def test_every_transformer_of_diffusers_has_a_row_or_no_adaptive_layer_norm():
    named = {class_name for class_name, _, _ in CASES.values()} | NO_ADALN
    classes = transformer_classes()
    assert named - classes.keys() == set()
    assert classes.keys() - named == set()


@of_this_release
def test_the_tested_table_names_the_installed_sources():
    """A new diffusers release may change a forward: look at the change, then put the new digest into the table."""
    assert owners_with_sites() == TESTED_SOURCES


@pytest.mark.parametrize("name", EAGER)
def test_a_model_without_anything_to_fuse_is_refused_with_the_reason(name):
    with pytest.raises(UserError, match="found nothing to patch in"):
        patch_model(tiny_case(name)[0])
