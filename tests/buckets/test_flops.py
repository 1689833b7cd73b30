"""FLOPs counted from a config are those that torch counts when the model runs, and what cannot be counted is named."""

import json

import diffusers
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from adaptiveload_hf import LatentShape, UserError
from adaptiveload_hf.buckets.cost import cost_model_from_dict
from adaptiveload_hf.buckets.flops import count_flops, flops_cost

SIZES = {"num_attention_heads": 2, "attention_head_dim": 24, "num_layers": 4, "in_channels": 4}
B, T = 2, 20


def model_and_inputs(family, shape, **options):
    """A tiny diffusers model of the family, and a micro-batch of latents of the shape with prompts of T tokens."""
    size = (shape.frames, shape.height, shape.width)
    visual = shape.frames * shape.height * shape.width
    inputs = {"timestep": torch.ones(B), "encoder_hidden_states": torch.randn(B, T, 32)}
    pooled = {"pooled_projections": torch.randn(B, 16)}
    if family == "Wan":
        model = diffusers.WanTransformer3DModel(
            **SIZES, ffn_dim=160, text_dim=32, freq_dim=32, out_channels=4, **options
        )
        image = {"encoder_hidden_states_image": torch.randn(B, 257, 16)} if options else {}
        return model, {"hidden_states": torch.randn(B, 4, *size), **inputs, **image}
    if family == "SD3":
        text = {"caption_projection_dim": 48, "joint_attention_dim": 32, "pooled_projection_dim": 16}
        model = diffusers.SD3Transformer2DModel(**SIZES, **text, sample_size=8, out_channels=4, **options)
        return model, {"hidden_states": torch.randn(B, 4, *size[1:]), **inputs, **pooled}
    if family == "Flux":
        sizes = {**SIZES, "in_channels": 16, "num_single_layers": 4, "axes_dims_rope": (8, 8, 8)}
        model = diffusers.FluxTransformer2DModel(**sizes, joint_attention_dim=32, pooled_projection_dim=16)
        places = {"img_ids": torch.zeros(visual // 4, 3), "txt_ids": torch.zeros(T, 3)}
        return model, {"hidden_states": torch.randn(B, visual // 4, 16), **inputs, **pooled, **places}
    if family == "HunyuanVideo":
        sizes = {**SIZES, "num_single_layers": 4, "rope_axes_dim": (8, 8, 8), "text_embed_dim": 32, "mlp_ratio": 3.0}
        model = diffusers.HunyuanVideoTransformer3DModel(**sizes, out_channels=4, pooled_projection_dim=16)
        extra = {"encoder_attention_mask": torch.ones(B, T), "guidance": torch.ones(B)}
        return model, {"hidden_states": torch.randn(B, 4, *size), **inputs, **pooled, **extra}
    if family == "CogVideoX":
        sizes = {**SIZES, "time_embed_dim": 16, "text_embed_dim": 32, "max_text_seq_length": T, "out_channels": 4}
        sample = {"sample_frames": 4 * size[0] - 3, "sample_height": size[1], "sample_width": size[2]}
        model = diffusers.CogVideoXTransformer3DModel(**sizes, **sample)
        return model, {"hidden_states": torch.randn(B, size[0], 4, *size[1:]), **inputs}
    text = {"cross_attention_dim": 48, "caption_channels": 32, "out_channels": 4}
    model = diffusers.LTXVideoTransformer3DModel(**SIZES, **text)
    extra = dict(zip(("num_frames", "height", "width"), size), encoder_attention_mask=torch.ones(B, T))
    return model, {"hidden_states": torch.randn(B, visual, 4), **inputs, **extra}


@pytest.mark.parametrize(
    ("family", "shapes", "options"),
    [
        ("Wan", ("1x8x8", "3x16x16"), {}),
        ("Wan", ("3x16x16",), {"image_dim": 16, "added_kv_proj_dim": 48}),
        ("SD3", ("1x32x16", "1x32x32"), {}),
        ("SD3", ("1x32x16", "1x32x32"), {"dual_attention_layers": (0, 1), "qk_norm": "rms_norm"}),
        ("Flux", ("1x8x8", "1x32x16"), {}),
        ("HunyuanVideo", ("1x8x8", "3x16x16"), {}),
        ("CogVideoX", ("1x8x8", "3x16x16"), {}),
        ("LTX", ("1x8x8", "3x16x16"), {}),
    ],
)
def test_the_counted_flops_are_those_of_the_running_model(family, shapes, options):
    for shape in map(LatentShape.parse, shapes):
        model, inputs = model_and_inputs(family, shape, **options)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(**inputs, return_dict=False)[0].sum().backward()
        counted = count_flops(model, text_tokens=T)
        assert counted.model_class == type(model).__name__
        predicted = 1e12 * counted.cost.seconds(B, counted.geometry.tokens(shape))
        # What is counted too much: text that a last layer drops, gradients that the inputs do not need.
        assert 1.0 <= predicted / counter.get_total_flops() < 1.025, shape


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


def test_the_usual_length_of_the_prompt_is_each_familys_own():
    assert flops_cost(wan()) == flops_cost(wan(), text_tokens=512) != flops_cost(wan(), text_tokens=100)
    assert count_flops(wan()).geometry.text_tokens == 0
    text = {"caption_projection_dim": 48, "joint_attention_dim": 32, "pooled_projection_dim": 16}
    assert count_flops(diffusers.SD3Transformer2DModel(**SIZES, **text)).geometry.text_tokens == 333


def test_what_is_not_understood_names_the_keys_that_were_looked_for(tmp_path):
    with pytest.raises(UserError, match=r"WanTransformer3DModel: num_layers.*ffn_dim.*Found no class name with depth"):
        flops_cost({"depth": 3})
    with pytest.raises(UserError, match=r"LTXVideoTransformer3DModel: .*Found PixArtTransformer2DModel with"):
        flops_cost(wan(_class_name="PixArtTransformer2DModel"))
    with pytest.raises(UserError, match=r"Found no class name with .*vace_layers"):
        flops_cost(wan(vace_layers=[0, 5]))
    with pytest.raises(UserError, match="ffn_dim of a transformer's config must be above 0, but it is None"):
        flops_cost(wan(ffn_dim=None))
    for wrong in ({"patch_size": 2}, {"num_attention_heads": [1, 2]}, {"out_channels": "x"}):
        with pytest.raises(UserError, match="A value in the config is not what a WanTransformer3DModel has"):
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
