"""Are copies of a patched model, and what is saved of it, what they are without a patch?"""

import copy
import io

import torch
from diffusers.training_utils import EMAModel
from support.compositions import BOTH, ORDERS, cells_of, composed, fused_ops, plain_ops
from support.tiny_models import relative_error, tiny_inputs, tiny_model

from adaptiveload_hf import patch_model, patched, unpatch_model


@torch.no_grad()
def run(model, family):
    output, ops = fused_ops(model, **tiny_inputs(family), return_dict=False)
    return output[0], ops


def zero(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


@BOTH
@ORDERS
def test_a_deep_copy_runs_its_own_weights_and_the_original_its_own(family, patch_first, record):
    expected, _ = run(tiny_model(family), family)
    originals = []

    def compose(model):
        originals.append(model)
        return copy.deepcopy(model)

    twin = composed(family, compose, patch_first)
    output, ops = run(twin, family)
    assert relative_error(output, expected) < 1e-5
    zero(twin)
    assert run(twin, family)[0].abs().max() == 0
    untouched, original_ops = run(originals[0], family)
    assert relative_error(untouched, expected) < 1e-5
    assert bool(original_ops) is patch_first, "a patched copy patches its original, or loses it the patch"
    record("copy.deepcopy", cells_of(family, patch_first, ops, plain_ops(family)))


@BOTH
def test_copies_of_copies_are_unpatched_one_by_one(family):
    model = tiny_model(family)
    expected, _ = run(model, family)
    patch_model(model)
    twin = copy.deepcopy(copy.deepcopy(model))
    unpatch_model(twin)
    assert run(twin, family)[1].total() == 0
    assert torch.equal(run(twin, family)[0], expected)
    assert run(model, family)[1] == plain_ops(family)


@BOTH
@ORDERS
def test_averaged_weights_are_those_of_an_unpatched_model_and_can_be_swapped_in(family, patch_first, record, tmp_path):
    averages = []

    def compose(model):
        ema = EMAModel(model.parameters(), decay=0.5, model_cls=type(model), model_config=model.config)
        for _ in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
            ema.step(model.parameters())
        averages.append(ema)

    unpatched, model = composed(family, compose, None), composed(family, compose, patch_first)
    assert all(map(torch.equal, averages[0].shadow_params, averages[1].shadow_params))
    trained, _ = run(model, family)
    for ema, subject in zip(averages, (unpatched, model)):
        ema.store(subject.parameters())
        ema.copy_to(subject.parameters())
    output, ops = run(model, family)
    assert relative_error(output, run(unpatched, family)[0]) < 1e-5
    assert relative_error(output, trained) > 1e-3
    averages[1].restore(model.parameters())
    assert torch.equal(run(model, family)[0], trained)
    averages[1].save_pretrained(tmp_path)
    loaded = EMAModel.from_pretrained(tmp_path, type(model))
    assert all(map(torch.equal, loaded.shadow_params, averages[0].shadow_params))
    record("EMAModel", cells_of(family, patch_first, ops, plain_ops(family)))


@BOTH
@ORDERS
def test_torch_save_keeps_the_patch(family, patch_first, record):
    def compose(model):
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    loaded = composed(family, compose, patch_first)
    expected, _ = run(tiny_model(family), family)
    output, ops = run(loaded, family)
    assert relative_error(output, expected) < 1e-5
    unpatch_model(loaded)
    assert torch.equal(run(loaded, family)[0], expected)
    record("torch.save of the model", cells_of(family, patch_first, ops, plain_ops(family)))


@BOTH
@ORDERS
def test_what_save_pretrained_wrote_is_the_unpatched_model(family, patch_first, record, tmp_path):
    def compose(model):
        model.save_pretrained(tmp_path)
        return type(model).from_pretrained(tmp_path).train()

    loaded = composed(family, compose, patch_first)
    expected, _ = run(tiny_model(family), family)
    output, ops = run(loaded, family)
    assert list(loaded.state_dict()) == list(tiny_model(family).state_dict())
    assert torch.equal(output, expected) if patch_first else relative_error(output, expected) < 1e-5
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["config.json", "diffusion_pytorch_model.safetensors"]
    # A folder holds no patch: the attention column is that of a model which is patched after it was loaded.
    cells = cells_of(family, patch_first, ops, plain_ops(family))
    if patch_first:
        assert cells.pop("Wan's attention", "stock") == "stock"
    record("save_pretrained, from_pretrained", cells)


@BOTH
def test_weights_load_into_a_patched_model(family):
    model = tiny_model(family)
    with patched(model):
        expected, _ = run(tiny_model(family, seed=1), family)
        model.load_state_dict(tiny_model(family, seed=1).state_dict())
        assert relative_error(run(model, family)[0], expected) < 1e-5
        model.load_state_dict(tiny_model(family, seed=1).state_dict(), assign=True)
        assert relative_error(run(model, family)[0], expected) < 1e-5
