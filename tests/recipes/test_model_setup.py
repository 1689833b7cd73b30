"""Is the model set up as asked, described as it is, and refused where its first step would fail?"""

import types

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from diffusers import SD3Transformer2DModel, WanTransformer3DModel
from lora import add_lora
from model_setup import (
    describe_run,
    load_model_config,
    load_transformer,
    prepare_training,
    refuse_unsafe_sharding,
    save_result,
)
from safetensors.torch import load_file
from support.accelerators import FSDP2, fresh_accelerate, one_rank
from support.recipe_arguments import parse
from support.worlds import on_ranks
from torch.distributed.fsdp import MixedPrecisionPolicy
from wan_training import MODEL_CLASS, PIPELINE_CLASS

from adaptiveload_hf import UserError, make_accelerator


def environment_under(pipeline, sizes):
    accelerator, args = make_accelerator(parallelism_config=ParallelismConfig(**sizes)), parse(pipeline)
    return describe_run(accelerator, args, MODEL_CLASS, load_model_config(MODEL_CLASS, args))[1]


def prepared(accelerator, args):
    return prepare_training(accelerator, args, load_transformer(accelerator, MODEL_CLASS, args))


def test_a_run_describes_what_its_seconds_hold_for(small_pipeline):
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        args = parse(small_pipeline, "--gradient_checkpointing", "--no_patch", "--rank", 2)
        config = load_model_config(MODEL_CLASS, args)
        accelerator = make_accelerator(gradient_accumulation_steps=2)
        model, environment = describe_run(accelerator, args, MODEL_CLASS, config)
        deeper, _ = describe_run(accelerator, args, MODEL_CLASS, {**config, "num_layers": 5})
    assert model["class"] == "WanTransformer3DModel"
    assert model["config_hash"] != deeper["config_hash"]
    assert (environment["world_size"], environment["strategy"], environment["dtype"]) == (1, "single", "float32")
    assert (environment["patched"], environment["activation_checkpointing"]) == (False, True)
    assert environment["compiled"] is False
    with fresh_accelerate(ACCELERATE_USE_CPU="true", ACCELERATE_DYNAMO_BACKEND="inductor"):
        assert describe_run(make_accelerator(), args, MODEL_CLASS, config)[1]["compiled"] is True
    assert (environment["gradient_accumulation_steps"], environment["lora"]) == (2, True)
    assert "dp_shard_size" not in environment


@pytest.mark.distributed
def test_hsdp_is_described_with_the_ranks_it_shards_over(small_pipeline):
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 2}
    for environment in on_ranks(4, environment_under, str(small_pipeline), sizes, **FSDP2):
        assert (environment["strategy"], environment["world_size"], environment["dp_shard_size"]) == ("hsdp", 4, 2)


@pytest.mark.parametrize(
    ("variables", "checkpointing", "message"),
    [
        ({"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, False, "has fsdp_cpu_ram_efficient_loading: true"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, True, "checkpointed twice"),
        ({"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}, False, "has no fsdp_auto_wrap_policy"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, False, "fsdp_offload_params: true, which needs a GPU"),
    ],
)
def test_fsdp_settings_that_fail_in_the_first_step_are_refused(variables, checkpointing, message):
    with fresh_accelerate(**one_rank(**{**FSDP2, **variables})), pytest.raises(UserError, match=message):
        refuse_unsafe_sharding(make_accelerator(), checkpointing)


def test_a_lora_that_could_not_go_on_under_fsdp2_and_a_whole_compiled_model_is_refused():
    compiled = {"ACCELERATE_DYNAMO_BACKEND": "inductor"}
    with fresh_accelerate(**one_rank(**FSDP2, **compiled)):
        refuse_unsafe_sharding(make_accelerator(), gradient_checkpointing=False)  # all weights do
        with pytest.raises(UserError, match=r"LoRA under FSDP2 with a dynamo_backend.*use_regional_compilation: true"):
            refuse_unsafe_sharding(make_accelerator(), gradient_checkpointing=False, lora=True)
    with fresh_accelerate(**one_rank(**FSDP2, **compiled, ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION="true")):
        refuse_unsafe_sharding(make_accelerator(), gradient_checkpointing=False, lora=True)


def test_parallelism_by_which_ranks_would_do_the_same_work_twice_is_refused():
    parallelism = types.SimpleNamespace(non_data_parallel_size=2)
    run = types.SimpleNamespace(process_index=0, num_processes=4, parallelism_config=parallelism)
    with pytest.raises(UserError, match=r"cp_size, sp_size and tp_size make 2 data ranks of 4 processes"):
        refuse_unsafe_sharding(run, gradient_checkpointing=False)


def test_checkpointing_under_a_policy_that_casts_inputs_is_refused_by_name():
    with fresh_accelerate(**one_rank(**FSDP2)):
        plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=MixedPrecisionPolicy(torch.bfloat16))
        accelerator = make_accelerator(fsdp_plugin=plugin)
        with pytest.raises(UserError, match=r"cast_forward_inputs=True.*fsdp_activation_checkpointing: true"):
            refuse_unsafe_sharding(accelerator, gradient_checkpointing=True)


def test_from_scratch_takes_the_configuration_but_not_the_weights(small_pipeline):
    with fresh_accelerate(ACCELERATE_USE_CPU="true"):
        torch.manual_seed(1)
        model = prepared(make_accelerator(), parse(small_pipeline, "--from_scratch", "--no_patch"))[0]
    saved = WanTransformer3DModel.from_pretrained(small_pipeline, subfolder="transformer")
    assert dict(model.config).items() >= {"num_layers": saved.config.num_layers}.items()
    assert not torch.equal(model.proj_out.weight, saved.proj_out.weight)


def test_a_pipeline_of_another_family_is_named(small_pipeline):
    with pytest.raises(
        UserError, match=r"whose transformer is a SD3Transformer2DModel, but that of .* is a WanTransf"
    ):
        load_model_config(SD3Transformer2DModel, parse(small_pipeline))


@pytest.mark.parametrize("launch", [{"ACCELERATE_USE_CPU": "true"}, one_rank(**FSDP2)], ids=["single", "fsdp2"])
def test_under_bf16_a_lora_is_trained_in_float32_and_its_base_stays_in_bf16(small_pipeline, launch):
    with fresh_accelerate(**launch):
        model, optimizer, _ = prepared(make_accelerator(mixed_precision="bf16"), parse(small_pipeline, "--rank", 2))
        trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
        frozen = {name: p.dtype for name, p in model.named_parameters() if not p.requires_grad}
        held = sum(len(group["params"]) for group in optimizer.param_groups)
    assert len(trained) == held == 2 * 2 * 2 * 4  # blocks, attentions, A and B, targets
    assert set(trained.values()) == {torch.float32}
    assert frozen["blocks.0.attn1.to_q.base_layer.weight"] == frozen["blocks.1.ffn.net.2.weight"] == torch.bfloat16


@pytest.mark.parametrize("regional", ["false", "true"])
@pytest.mark.parametrize("launch", [{"ACCELERATE_USE_CPU": "true"}, one_rank(**FSDP2)], ids=["single", "fsdp2"])
def test_what_a_compiled_run_saves_is_named_as_what_any_other_saves(small_pipeline, tmp_path, launch, regional):
    compiled = {"ACCELERATE_DYNAMO_BACKEND": "eager", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": regional}
    for kind in ("whole", "lora"):
        args = parse(small_pipeline, *(["--rank", 2] if kind == "lora" else []))
        args.output_dir = tmp_path / kind
        with fresh_accelerate(**launch, **compiled):
            accelerator = make_accelerator()
            model, _, _ = prepared(accelerator, args)
            save_result(accelerator, args, model, PIPELINE_CLASS, "transformer")
            if kind == "lora":  # the adapter alone is in a checkpoint
                assert all("lora_" in name for name in accelerator.get_state_dict(model))
    trained = WanTransformer3DModel.from_pretrained(tmp_path / "whole" / "transformer")
    original = WanTransformer3DModel.from_pretrained(small_pipeline, subfolder="transformer")
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), original.parameters(), strict=True))
    adapter = load_file(tmp_path / "lora" / "pytorch_lora_weights.safetensors")
    linear = {
        f"transformer.{name}" for name, module in original.named_modules() if isinstance(module, torch.nn.Linear)
    }
    assert len(adapter) == 2 * 2 * 2 * 4
    assert {name.rpartition(".lora_")[0] for name in adapter} <= linear


def test_lora_targets_that_are_not_there_are_refused(small_pipeline):
    args = parse(small_pipeline, "--rank", 2, "--lora_target_modules", "to_q", "to_z", "q")
    transformer = WanTransformer3DModel.from_pretrained(small_pipeline, subfolder="transformer")
    with pytest.raises(UserError, match=r"to_z q names no linear module.*attn1.to_q.*ffn.net.2"):
        add_lora(transformer, args)
