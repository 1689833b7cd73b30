"""Does every launch either train one model over all its ranks or end at once with the reason?"""

import json
import os
import re
import sys
import time

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from support.accelerators import fresh_accelerate
from support.launch import ROOT, launch, run
from torch.distributed.run import get_args_parser as torch_launch_parser

from adaptiveload_hf import UserError, make_accelerator
from adaptiveload_hf.distributed import all_ranks_fail_together, model_input_dtype, strategy_of

WORKER = ROOT / "tests" / "support" / "fsdp_worker.py"
CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch):
    """accelerate keeps its state in class attributes and the environment."""
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_")) or name in ("WORLD_SIZE", "LOCAL_RANK", "RANK"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # accelerate sets it when it is given a plugin


def test_one_process_gets_a_plain_accelerator_whose_scheduler_the_loop_steps():
    accelerator = make_accelerator(gradient_accumulation_steps=3)
    assert strategy_of(accelerator) == "single"
    assert accelerator.gradient_accumulation_steps == 3
    assert not accelerator.step_scheduler_with_optimizer
    assert model_input_dtype(accelerator) == torch.float32


def test_fsdp_asked_for_in_a_process_without_launcher_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(UserError, match=r"asks for FSDP, but accelerate found NO.*fsdp2\.yaml"):
        make_accelerator()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_fsdp1_is_refused_by_name(monkeypatch, precision):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(UserError, match=r"needs fsdp_version 2, but the launch configuration says 1"):
        make_accelerator()


@pytest.mark.parametrize(("name", "said"), [("DEEPSPEED", "DeepSpeed"), ("MEGATRON_LM", "Megatron-LM")])
def test_engines_with_a_loop_of_their_own_are_refused(name, said):
    with (
        fresh_accelerate(**{f"ACCELERATE_USE_{name}": "true"}),
        pytest.raises(UserError, match=rf"asks for {said}, which is not supported.*fsdp2\.yaml"),
    ):
        make_accelerator()


@pytest.mark.parametrize("steps", [0, -1, 1.5, "2", None])
def test_an_accumulation_that_is_no_number_of_micro_steps_is_refused(steps):
    with pytest.raises(UserError, match=f"a whole number from 1 on, but found {steps!r}"):
        make_accelerator(gradient_accumulation_steps=steps)


@pytest.mark.parametrize("name", ["split_batches", "dispatch_batches"])
def test_options_that_would_cut_or_send_micro_batches_are_refused(name):
    with pytest.raises(UserError, match=f"need {name}=False, but it is True"):
        make_accelerator(dataloader_config=DataLoaderConfiguration(**{name: True}))


@pytest.mark.parametrize(
    "option",
    [
        {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2)},
        {"step_scheduler_with_optimizer": False},
    ],
)
def test_options_that_are_set_already_are_refused_by_name(option):
    (name,) = option
    with pytest.raises(UserError, match=f"sets {name} itself, but it is given: .* Leave {name} out"):
        make_accelerator(**option)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(UserError, match=r"started 8 processes on this machine, but it has 2 GPUs\. .*--num_processes"):
        make_accelerator()


def test_processes_that_see_one_gpu_each_are_not_too_many(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    make_accelerator(gradient_accumulation_steps=2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(UserError, match="it has 1 GPU"):
        make_accelerator()


def test_fsdp_asked_for_by_a_plugin_is_checked_alike():
    with pytest.raises(UserError, match="asks for FSDP, but accelerate found NO"):
        make_accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))


def test_with_one_process_an_exception_passes_through():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ZeroDivisionError), all_ranks_fail_together(accelerator):
        raise ZeroDivisionError


@pytest.mark.distributed
def test_multi_cpu_which_starts_one_process_only_is_refused(tmp_path):
    config = tmp_path / "multi_cpu.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nmixed_precision: 'no'\n"
        "num_machines: 1\nnum_processes: 2\nuse_cpu: true\n"
    )
    done = launch(WORKER, "user", config=config)
    assert done.returncode != 0
    assert "asks for several processes, but 1 was started" in done.stderr


@pytest.mark.distributed
def test_processes_that_accelerate_would_not_join_are_refused():
    done = run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", WORKER, "user"])
    assert done.returncode != 0
    assert "started 2 processes (WORLD_SIZE), but accelerate joins 1" in done.stderr
    assert "ACCELERATE_USE_CPU=true" in done.stderr


@pytest.mark.distributed
def test_two_cpu_ranks_train_one_fsdp2_model_and_a_failing_rank_ends_both(tmp_path):
    config = tmp_path / "bf16.yaml"
    settings = yaml.safe_load((ROOT / "accelerate_configs" / "cpu.yaml").read_text())
    config.write_text(yaml.safe_dump({**settings, "mixed_precision": "bf16"}))
    begin = time.monotonic()
    done = launch(WORKER, "user", config=config)
    assert time.monotonic() - begin < 60
    # Some versions of gloo print a line of their own.
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    first, second = sorted(found, key=lambda rank: rank["rank"])

    for found in (first, second):
        assert (found["ranks"], found["is_fsdp2"], found["device"], found["strategy"]) == (2, True, "cpu", "fsdp2")
        assert found["timestep"][0] == pytest.approx(997.3, abs=1e-3), "bf16 would make it 996"
        assert found["hidden"] == "torch.bfloat16"
        assert "torch.bfloat16" not in found["rotary"]
        assert found["gradient_dtype"] == ["torch.float32"]
        assert found["finer_than_bfloat16"] > 100, "the ranks' gradients were added in bf16"
    assert first["grad_norm"] == second["grad_norm"]
    assert first["held_gradient"] + second["held_gradient"] == first["whole_gradient"], "gradient held unsharded"

    assert done.returncode != 0
    assert "rank 1 of 2: error: sample 7 (a.mp4) holds a NaN" in done.stderr
    assert "sample 7 (a.mp4) holds a NaN" in done.stderr[done.stderr.index("Root Cause") :], "not the last words"


@pytest.mark.distributed
def test_a_bug_on_one_rank_shows_its_traceback_and_not_its_echo_on_the_others():
    done = launch(WORKER, "bug")
    assert done.returncode != 0
    assert "rank 1 of 2: Traceback" in done.stderr
    assert "ZeroDivisionError: a bug on rank 1" in done.stderr[done.stderr.index("Root Cause") :]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerates_own_parser_takes_every_key_of_the_launch_configurations(path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = yaml.safe_load(path.read_text())
    parser = launch_command_parser()
    arguments = parser.parse_args(["--config_file", str(path), "--main_process_port", "0", "train.py"])
    # accelerate ignores a misspelt key without a word.
    for section in ("fsdp_config", "parallelism_config"):
        assert set(settings.get(section, {})) <= set(vars(arguments))
    arguments, defaults, _ = _validate_launch_command(arguments)
    assert arguments.num_processes == settings["num_processes"]
    assert defaults.distributed_type.value == settings["distributed_type"]
    if settings["distributed_type"] == "FSDP":
        environment = prepare_multi_gpu_env(arguments)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2
        assert not plugin.cpu_ram_efficient_loading
        assert plugin.reshard_after_forward is True


def test_accelerate_takes_the_launch_lines_of_the_documentation(monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "training.md").read_text().replace("\\\n", " ")
    numbers = {"$((8 * SLURM_NNODES))": "128", "$SLURM_NODEID": "3", "$SLURM_NNODES": "16", "$MASTER": "node"}
    launched = []
    for line in re.findall(r"accelerate launch (.*recipes/train_wan.py)", text):
        for name, value in numbers.items():
            line = line.replace(name, value)
        arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(line.split()))
        launched.append(arguments.num_processes)
        environment = prepare_multi_gpu_env(arguments)
        sizes = [int(environment.get(f"PARALLELISM_CONFIG_DP_{kind}_SIZE", 1)) for kind in ("REPLICATE", "SHARD")]
        assert sizes[0] * sizes[1] in (1, arguments.num_processes)
    assert launched == [8, 16, 128]


def test_torchrun_takes_its_line_of_the_documentation_and_it_says_what_fsdp2_yaml_says(monkeypatch):
    text = (ROOT / "docs" / "training.md").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^(ACCELERATE_USE_FSDP=.* torchrun .*recipes/train_wan.py)", text, re.M)
    said, words = line.split(" torchrun ")
    arguments = torch_launch_parser().parse_args(words.split())
    assert (arguments.nnodes, arguments.nproc_per_node, arguments.rdzv_backend) == ("2", "8", "c10d")
    file = ["--config_file", str(ROOT / "accelerate_configs" / "fsdp2.yaml"), "train.py"]
    launched, _, _ = _validate_launch_command(launch_command_parser().parse_args(file))
    plugins = []
    for environment in (dict(word.split("=") for word in said.split()), prepare_multi_gpu_env(launched)):
        with fresh_accelerate(**environment):
            precision = os.environ["ACCELERATE_MIXED_PRECISION"]
            plugins.append((str(FullyShardedDataParallelPlugin()), precision))
    assert plugins[0] == plugins[1]


def test_every_key_of_the_launch_configurations_that_is_a_choice_has_its_reason():
    plain = {"compute_environment", "distributed_type", "fsdp_config", "parallelism_config", "num_machines"}
    for path in CONFIGS:
        for line in path.read_text().splitlines():
            key = line.strip().split(":")[0]
            if not line.startswith("#") and key not in plain | {"num_processes", "use_cpu"}:
                assert " # " in line, f"{path.name}: {line}"
