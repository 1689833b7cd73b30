"""FLOPs counted from a config are those that torch counts when the model runs, and what cannot be counted is named."""

import json
import math
import re
from pathlib import Path

import diffusers
import pytest
import torch
from support.model_configs import CASES, tiny_case
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from adaptiveload_hf import LatentShape, UserError
from adaptiveload_hf.buckets import flops
from adaptiveload_hf.buckets.cost import cost_model_from_dict
from adaptiveload_hf.buckets.flops import count_flops, flops_cost
from adaptiveload_hf.buckets.transformers import FAMILIES

SIZES = {"num_attention_heads": 2, "attention_head_dim": 24, "num_layers": 4, "in_channels": 4}
FAMILY = {family.model_class: family for family in FAMILIES}
NAMES = [name for name, (model_class, _, _) in CASES.items() if model_class in FAMILY]
# Tables of positions hold the few dozen tokens that are counted with, and no product.
PLACES = {"sample_size": 64, "pos_embed_max_size": 256, "max_size": (4, 32, 32), "axes_lens": [256, 64, 64]}
# Deep enough that what a last layer drops weighs little.
LAYERS = {"num_layers": 8, "n_layers": 8, "num_mmdit_layers": 2, "num_single_dit_layers": 6, "num_single_layers": 2}
# Their tiny cases have fewer tokens beside the prompt's than the pipelines give.
FURTHER = {"HunyuanVideo 1.5": (4, 3), "LTX 2": (9,), "LTX 2.3": (9,)}
# Z-Image fills up both sequences to 32 tokens. TI2V's and diffusion forcing's timesteps are of single tokens and
# frames. Of SD3 and CogVideoX at this size a token of the prompt takes less than one of the latent: c0 is cut at 0.
OTHER_WORK = {"Z-Image", "Wan 2.2 TI2V", "SkyReels V2 DF", "SD3", "SD3.5 medium", "SD3.5 large", "CogVideoX"}


def changed(config, *sizes):
    """A tiny config with other values for those of its keys that are in `sizes`."""
    return {key: next((size[key] for size in sizes if key in size), value) for key, value in config.items()}


def torch_flops(model, inputs, backward=False):
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        out = model(**{**inputs, "return_dict": False})[0]
        if backward:
            (out if isinstance(out, torch.Tensor) else out[0]).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OTHER_WORK])
def test_the_forward_of_a_tiny_model_has_the_counted_flops(name, monkeypatch):
    model, inputs = tiny_case(name)
    if name == "Wan I2V":
        inputs["encoder_hidden_states_image"] = torch.randn(2, 257, 8)
    family = FAMILY[type(model).__name__]
    if name in FURTHER:
        monkeypatch.setattr(flops, "FAMILIES", (family._replace(further=FURTHER[name]),))
    counted = count_flops(changed(model.config, PLACES), text_tokens=inputs["encoder_hidden_states"].shape[1])
    assert counted.model_class == family.model_class
    batch, *sizes = inputs["hidden_states"].shape
    sizes = {"F": 1, **dict(zip(family.latents, sizes))}
    visual = sizes.get("S") or sizes["F"] * sizes["H"] * sizes["W"] // math.prod(counted.geometry.patch_size)
    predicted = 1e12 / 3 * counted.cost.seconds(batch, visual + counted.geometry.text_tokens)
    # What is done once for a batch, such as positions, is counted for each sample.
    assert predicted == pytest.approx(torch_flops(model, inputs), rel=0.001)


@pytest.mark.parametrize("model_class", FAMILY)
def test_forward_and_backward_have_about_the_counted_flops(model_class):
    family = FAMILY[model_class]
    _, config, _ = next(case for case in CASES.values() if case[0] == model_class)
    config = changed({key: value for key, value in config.items() if value is not None}, PLACES, LAYERS)
    model = getattr(diffusers, model_class)(**{**config, **family.changed(config)})
    for shape, text in (("1x32x32", 32), ("1x16x32", 64), ("3x16x32" if "F" in family.latents else "1x16x16", 32)):
        shape, patch = LatentShape.parse(shape), family.patch_size(model.config)
        grid = tuple(size // p for size, p in zip((shape.frames, shape.height, shape.width), patch))
        inputs = family.inputs(model.forward, model.config, grid, text, *family.further)
        counted = count_flops(model, text)
        predicted = 1e12 * counted.cost.seconds(1, counted.geometry.tokens(shape))
        # torch counts the backward of Sana's depthwise convolutions as if each channel saw all others.
        ratio = predicted / (
            3 * torch_flops(model, inputs) if "Sana" in model_class else torch_flops(model, inputs, True)
        )
        # What is counted too much: text that a last layer drops, gradients that the inputs do not need.
        assert 1.0 <= ratio < 1.025, shape


def test_the_documentation_names_each_class_and_its_usual_prompt():
    page = Path(__file__).parents[2].joinpath("docs/cost-model.md").read_text()
    rows = re.findall(r"^\| (\d+|as the config says) \| (.*) \|$", page, re.MULTILINE)
    named = {
        f"{name}Transformer": length for length, names in rows for name in re.sub(r" \(.*\)", "", names).split(", ")
    }
    usual = {family.model_class[: -len("3DModel")]: str(family.text_tokens) for family in FAMILIES}
    assert named == {**usual, "CogVideoXTransformer": "as the config says"}
    changelog = Path(__file__).parents[2].joinpath("CHANGELOG.md").read_text()
    assert f"config of {len(FAMILIES)} transformers" in " ".join(changelog.split())


def wan(**changes):
    return {**diffusers.WanTransformer3DModel(**SIZES, ffn_dim=64).config, **changes}


def test_a_model_its_config_a_dict_and_a_folder_give_the_same_cost(tmp_path):
    model = diffusers.WanTransformer3DModel(**SIZES, ffn_dim=64)
    model.save_config(tmp_path / "pipeline" / "transformer")
    costs = [flops_cost(given) for given in (model, model.config, dict(model.config))]
    costs += [flops_cost(tmp_path / "pipeline"), flops_cost(str(tmp_path / "pipeline" / "transformer"))]
    assert set(costs) == {costs[0]}
    assert cost_model_from_dict({"kind": costs[0].kind, "parameters": costs[0].parameters}) == costs[0]
    assert costs[0].unit == "relative cost"


def test_a_subclass_counts_as_its_class_and_a_config_without_a_name_must_have_exactly_a_classes_keys():
    class Sharded(diffusers.WanTransformer3DModel):  # as FSDP2 makes one
        pass

    assert flops_cost(Sharded(**SIZES, ffn_dim=64)) == flops_cost(wan())
    assert count_flops(wan(vace_layers=[0], vace_in_channels=96)).model_class == "WanVACETransformer3DModel"
    with pytest.raises(UserError, match=r"Found no _class_name, .*num_layers"):
        flops_cost({key: value for key, value in wan().items() if key != "ffn_dim"})
    named = {"_class_name": "WanTransformer3DModel", "num_layers": 2}  # as diffusers reads a config.json
    assert flops_cost(named) == flops_cost({**named, "ffn_dim": 13824}) != flops_cost({**named, "ffn_dim": 64})


def test_the_mode_and_precision_around_it_change_no_count():
    expected = flops_cost(wan())
    with torch.inference_mode():
        assert flops_cost(wan()) == expected
    with torch.device("meta"), torch.autocast("cpu"):
        assert (
            flops_cost(wan(_class_name="WanTransformer3DModel", quantization_config={"quant_method": "torchao"}))
            == expected
        )


def test_counting_leaves_random_numbers_and_the_attention_backend_alone(monkeypatch):
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    monkeypatch.setattr(
        _AttentionBackendRegistry, "_active_backend", AttentionBackendName.FLASH
    )  # that is not installed
    config, state = wan(), torch.get_rng_state()
    flops_cost(config)
    assert torch.equal(torch.get_rng_state(), state)
    assert _AttentionBackendRegistry._active_backend == AttentionBackendName.FLASH


def test_the_usual_length_of_the_prompt_is_each_familys_own():
    assert flops_cost(wan()) == flops_cost(wan(), text_tokens=512) != flops_cost(wan(), text_tokens=100)
    assert count_flops(wan()).geometry.text_tokens == 0
    text = {"caption_projection_dim": 48, "joint_attention_dim": 32, "pooled_projection_dim": 16}
    assert count_flops(diffusers.SD3Transformer2DModel(**SIZES, **text)).geometry.text_tokens == 333
    hunyuan = {"_class_name": "HunyuanVideo15Transformer3DModel", "num_layers": 1, "text_embed_dim": 64}
    hunyuan |= {"num_attention_heads": 1, "num_refiner_layers": 1}
    assert count_flops(hunyuan).geometry.text_tokens == 1000 + 256 + 729  # prompt, glyphs and image
    assert count_flops(hunyuan, text_tokens=100).geometry.text_tokens == 100 + 256 + 729


def test_what_cannot_be_counted_is_named_with_what_can_be_and_how_to_measure(tmp_path):
    with pytest.raises(
        UserError, match=r"counted for Wan.*, Z.*\. Found no _class_name, .* keys: depth\. .*measure_sh"
    ):
        flops_cost({"depth": 3})
    with pytest.raises(UserError, match=r"ZImageTransformer2DModel.*Found HiDreamImageTransformer2DModel\. What"):
        flops_cost(wan(_class_name="HiDreamImageTransformer2DModel"))
    with pytest.raises(UserError, match=r"Found no _class_name, .* keys: .*motion_dim"):
        flops_cost(wan(motion_dim=20))
    for wrong in ({"patch_size": 2}, {"num_attention_heads": [1, 2]}, {"out_channels": "x"}, {"ffn_dim": -1}):
        with pytest.raises(
            UserError, match=r"diffusers' WanTransformer3DModel does not run with this config: .*measure"
        ):
            flops_cost(wan(**wrong))
    with pytest.raises(UserError, match=r"Expected a transformer's config in .*config.json"):
        flops_cost(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is no JSON"):
        flops_cost(tmp_path)
    with pytest.raises(UserError, match=r"found Linear\. Unwrap a prepared model"):
        flops_cost(torch.nn.Linear(1, 1))
    with pytest.raises(UserError, match="text_tokens must be a whole number of at least 0, but it is -1"):
        flops_cost(wan(), text_tokens=-1)
    (tmp_path / "config.json").write_text(json.dumps([]))
    with pytest.raises(UserError, match="but found list"):
        flops_cost(tmp_path)
