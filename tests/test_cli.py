"""Do the commands print tables on stdout, words on stderr, and one plain line for every mistake?"""

import contextlib
import io
import json
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from support.full_disk import files_of_at_most
from support.measured import COST, make_config, measure, save_dataset
from support.training_logs import tokens_of, write_log

from adaptiveload_hf import BucketConfig, UserError, cli
from adaptiveload_hf.environment import save_setup
from adaptiveload_hf.errors import options_as_flags

ROOT = Path(__file__).parent.parent
COUNTS = {"1x60x104": 300, "5x60x104": 90, "13x60x104": 40, "21x60x104": 30}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """config, prepared (a dataset), shapes.json, run and measurements.jsonl, in a folder with a Chinese name."""
    folder = tmp_path_factory.mktemp("数据 set")
    make_config().save_pretrained(folder / "config")
    save_dataset(folder / "prepared", COUNTS)
    (folder / "shapes.json").write_text(json.dumps(COUNTS))
    (folder / "measurements.jsonl").write_text("".join(m.to_json() + "\n" for m in measure()))
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 0.5}\n{"st')
    return folder


@pytest.fixture
def run(files, monkeypatch, capsys):
    """Runs a command line among the files; returns (exit status, stdout, stderr)."""
    monkeypatch.chdir(files)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # restored afterwards

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["adaptiveload", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        if isinstance(ended.value.code, str):  # what Python itself prints to stderr before status 1
            return 1, out, err + ended.value.code
        return ended.value.code, out, err

    return run


PLAN = ("plan", "config", "--dataset", "prepared", "--world-size", "4")
SIMULATE = ("simulate", "config", "--dataset", "prepared", "--world-size", "4")
COUNT = ("count", "config", "--output", "counted")
FIT = ("fit", "measurements.jsonl", "--output", "fitted")
REPORT = ("report", "config", "--dataset", "prepared", "--run", "run", "--output", "out/report.html")


def test_fit_writes_a_config_and_prints_its_laws(run, files):
    status, out, err = run(*FIT)
    assert status == 0
    assert out.splitlines()[0].split()[:3] == ["law", "kind", "parameters"]
    assert "roofline" in out and "power_law" in out
    assert re.search(r"\nfloor +0\.4 +0\.\d+ +0\.\d+\n", out)
    assert BucketConfig.from_pretrained(files / "fitted").measurements == measure()
    following = err.splitlines()[-1]
    ranks = "--world-size 8 --gradient-accumulation-steps 1"
    assert following == f"next: adaptiveload plan fitted --dataset DATASET {ranks}"
    assert run(*following.replace("DATASET", "prepared").split()[2:])[0] == 0


def test_fit_says_how_sure_it_is_and_what_strays_and_contradicts_itself(run, files):
    strange = [replace(measure()[3], seconds=9.0), replace(measure()[4], peak_gib=9.9), *measure()[4:]]
    lines = [m.to_json() for m in [*measure()[:3], *strange]]
    (files / "strange.jsonl").write_text("\n".join(lines))
    status, out, err = run("fit", "strange.jsonl", "--output", "strange", "--json")
    assert status == 0
    assert "5x60x104 at batch size 1 took 9 s, " in err
    assert "5x60x104 at batch size 4 was measured at 6.12 to 9.90 GiB; the higher is used." in err
    found = json.loads(out)
    assert set(found["confidence"]) == set(found["cost_model"]["parameters"])
    assert [stray["name"] for stray in found["outliers"]] == ["5x60x104 at batch size 1"]
    assert len(found["findings"]) == 1


def test_fit_says_that_no_law_fits_contradictory_steps(run, files):
    twice = [*measure(), *(replace(m, seconds=3 * m.seconds) for m in measure())]
    (files / "twice.jsonl").write_text("\n".join(m.to_json() for m in twice))
    status, out, err = run("fit", "twice.jsonl", "--output", "twice", "--json")
    assert status == 0
    (found,) = [words for words in json.loads(out)["findings"] if words.startswith("No law fits: half of these steps")]
    assert found in err


def test_fit_from_a_log_writes_a_config_that_plans_within_what_ran(run, files):
    write_log(files / "log.jsonl", COST, steps=60)
    status, out, err = run("fit", "--from-log", "log.jsonl", "--output", "refitted", "--json")
    assert status == 0
    assert json.loads(out)["cost_model"]["errors"]["median"] < 0.05
    assert "2 steps are left out: the first 2." in err and "optimizer steps fitted" in err
    config = BucketConfig.from_pretrained(files / "refitted")
    assert (config.origin, config.environment) == ("training_log", {"world_size": 2, "gradient_accumulation_steps": 2})
    card = (files / "refitted" / "README.md").read_text()
    assert "fitted to the optimizer steps of a training run" in card and "share of the run's steps" in card
    assert "measured with the set-up" not in card and "| not measured |" in card
    assert err.splitlines()[-1].endswith("--world-size 2 --gradient-accumulation-steps 2"), "those of the run"
    assert config.memory_model is None
    status, _, err = run("plan", "refitted", "--shapes", "shapes.json")
    assert status == 0 and "Memory was not measured: micro-batches stay within" in err
    for wrong in ((), ("measurements.jsonl", "--from-log", "log.jsonl")):
        status, _, err = run("fit", *wrong, "--output", "refitted")
        assert status == 2 and "give either MEASUREMENTS or --from-log LOG" in err
    status, _, err = run("fit", "log.jsonl", "--output", "refitted")
    assert status == 1 and len(err.splitlines()) == 1, "not the same of each of a thousand lines"
    assert "line 1: not a measurement" in err and "is given by --from-log" in err


def test_fit_takes_the_geometry_of_a_log_from_its_set_up_or_options_and_guesses_none(run, files):
    longer = files / "longer"
    longer.mkdir()
    fit = ("fit", "--from-log", "longer/metrics.jsonl", "--output", "longer/refitted")
    write_log(longer / "metrics.jsonl", COST, steps=60, tokens=lambda shape: tokens_of(shape) + 333)
    assert "but patch size 1x2x2 and 0 text tokens make" in run(*fit)[2]
    assert run(*fit, "--text-tokens", "333")[0] == 0
    save_setup(longer, {"class": "Tiny", "patch_size": [1, 2, 2], "text_tokens": 333}, {"gpu": "A", "world_size": 8})
    assert run(*fit)[0] == 0
    config = BucketConfig.from_pretrained(longer / "refitted")
    assert (config.model["class"], config.geometry.text_tokens) == ("Tiny", 333)
    assert config.environment == {"gpu": "A", "world_size": 2, "gradient_accumulation_steps": 2}
    for options in (("--text-tokens", "0"), ("--patch-size", "1x1x1")):
        assert f"{options[0]} is {options[1]}, but the set-up beside the file says " in run(*fit, *options)[2]
    write_log(longer / "metrics.jsonl", COST, steps=60, tokens=None)
    assert run(*fit)[0] == 0, "the set-up says them"
    (longer / "run_setup.json").unlink()
    assert "says how many tokens its shapes have, by which laws are fitted" in run(*fit)[2]
    assert run(*fit, "--patch-size", "1x2x2")[0] == 0


def test_data_of_another_vae_than_the_config_is_refused(run, files):
    config = make_config()
    config = BucketConfig(**{**config.config, "model": {**config.model, "vae_scale": [4, 16]}}, measurements=measure())
    config.save_pretrained(files / "ti2v")
    plan = ("plan", "ti2v", "--world-size", "4")
    said = "stands for 4 frames and 8 pixels, but for the config's model for 4 frames and 16 pixels. Prepare"
    assert said in run(*plan, "--dataset", "prepared")[2]
    (files / "scanned.json").write_text(json.dumps({"shapes": COUNTS, "vae_scale": [4, 8]}))
    assert said in run(*plan, "--shapes", "scanned.json")[2]
    assert "81x960x1664" in run(*plan, "--shapes", "shapes.json")[1]


def test_a_stdout_that_is_no_file_gets_the_table(run, monkeypatch):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run(*PLAN)[0] == 0
    assert out.getvalue() == run(*PLAN)[1]


def test_fit_beside_a_config_keeps_its_model_and_environment_and_names_a_bad_line(run, files):
    (files / "config" / "cut.jsonl").write_text((files / "measurements.jsonl").read_text()[:-30])
    status, _, err = run("fit", "config/cut.jsonl", "--output", "again")
    assert status == 0
    assert "adaptiveload: warning: config/cut.jsonl, line 10: not a measurement" in err
    assert "9 measurements fitted" in err
    again, config = BucketConfig.from_pretrained(files / "again"), BucketConfig.from_pretrained(files / "config")
    assert (again.model, again.environment) == (config.model, config.environment)


def test_plan_prints_a_row_for_each_bucket_and_the_next_command(run):
    status, out, err = run(*PLAN)
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == ["shape", out.splitlines()[1].split()[0], *COUNTS]
    assert "81x480x832" in out
    assert "--gradient-accumulation-steps 2, as measured" in err
    assert "Memory limit 125.8 GiB" in err
    assert err.splitlines()[-1] == (
        "next: adaptiveload simulate config --dataset prepared --world-size 4 --gradient-accumulation-steps 2"
    )


def test_the_next_command_keeps_what_the_plan_needed(run):
    err = run(*PLAN, "--memory-limit-gib", "12.5", "--allow-extrapolation")[2]
    assert err.splitlines()[-1].endswith("--memory-limit-gib 12.5 --allow-extrapolation")
    assert run(*PLAN, "--balance", "step")[2].splitlines()[-1].endswith("--balance step")


def test_a_file_of_shapes_gives_the_plan_of_its_dataset(run):
    Path("scanned.json").write_text(
        json.dumps({"shapes": json.loads(Path("shapes.json").read_text()), "vae_scale": [4, 8]})
    )
    from_shapes = run("plan", "config", "--shapes", "scanned.json", "--world-size", "4")
    assert from_shapes[:2] == run(*PLAN)[:2]


def test_pixels_are_not_guessed_where_neither_samples_nor_config_say_what_a_latent_stands_for(run):
    out = run("plan", "config", "--shapes", "shapes.json", "--world-size", "4")[1]
    rows = [line.split() for line in out.splitlines()[2:]]
    assert rows and all(row[0] in COUNTS and row[1] == "-" for row in rows)


def test_plan_follows_its_options(run):
    options = ("--memory-limit-gib", "9.5", "--target-seconds", "50", "--gradient-accumulation-steps", "1", "--json")
    plan = json.loads(run(*PLAN, *options)[1])
    assert {bucket["bound_by"] for bucket in plan["buckets"]} == {"memory"}
    assert plan["target_seconds"] == 50
    assert json.loads(run(*PLAN, "--policy", "equal_token", "--json")[1])["policy"] == "equal_token"
    assert json.loads(run(*PLAN, "--balance", "none", "--json")[1])["balance"] == "none"


def test_simulate_shows_the_baseline_first_and_dealing_by_cost_ahead_of_it(run):
    status, out, err = run(*SIMULATE)
    assert status == 0
    assert out.splitlines()[2].split()[:2] == ["equal_token", "none"]
    rows = json.loads(run(*SIMULATE, "--json")[1])
    efficiency = {(row["policy"], row["balance"]): row["balance_efficiency"] for row in rows}
    assert efficiency["dual", "step"] > efficiency["equal_token", "none"]
    assert len(efficiency) == len(rows)
    assert "Measured on 8 ranks, planned for 4: a micro-batch is assumed to take as long there" in err
    assert "FSDP2 shards over 4 ranks instead of 8: " in err
    assert err.splitlines()[-1] == (
        "next: accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 4 recipes/train_wan.py "
        "--bucket_config config --output_dir run --pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-1.3B-Diffusers "
        "--dataset prepared "
        "--gradient_accumulation_steps 2"
    )
    _, _, err = run(*SIMULATE, "--balance", "none", "--memory-limit-gib", "9.5", "--allow-extrapolation")
    assert err.rstrip().endswith(" --balance none --memory_limit_gib 9.5 --allow_extrapolation")


def test_simulate_of_a_config_measured_on_a_cpu_goes_on_with_the_launch_configuration_for_one(run, files):
    make_config(environment={"gpu": None, "strategy": "fsdp2", "world_size": 4}).save_pretrained(files / "on_cpu")
    ranks = ["--world-size", "2", "--gradient-accumulation-steps", "1"]
    _, _, err = run("simulate", "on_cpu", "--shapes", "shapes.json", *ranks)
    assert "next: accelerate launch --config_file accelerate_configs/cpu.yaml --num_processes 2 " in err


def test_simulate_crosses_policies_balances_ranks_and_accumulation(run):
    options = ["--world-size", "2", "--gradient-accumulation-steps", "1", "--gradient-accumulation-steps", "4"]
    options += ["--policy", "dual", "--policy", "equal_token", "--balance", "none", "--balance", "window:2"]
    rows = json.loads(run(*SIMULATE, *options, "--json")[1])
    crossed = {(r["world_size"], r["gradient_accumulation_steps"], r["policy"], r["balance"]) for r in rows}
    assert len(crossed) == len(rows) == 2 * 2 * 2 * 2
    assert crossed > {(2, 4, "dual", "window:2"), (4, 1, "equal_token", "none")}
    for row in rows:
        assert row["gain"] == row["gain_from_batch_sizes"] * row["gain_from_dealing"]
    status, out, err = run(*SIMULATE, *options)
    assert status == 0 and len(out.splitlines()) == 2 + len(rows)
    assert out.splitlines()[0].split("  ")[0] == "policy" and "by sizes" in out and "by balance" in out
    assert err.splitlines()[-1].endswith("--gradient_accumulation_steps 1")


def test_plan_and_simulate_hold_the_samples_of_a_step(run):
    _, out, err = run(*PLAN, "--samples-per-step", "60", "--json")
    said = " ".join(json.loads(out)["findings"])
    assert "samples_per_step is 60." in said and " --samples-per-step is 60." in err
    assert err.splitlines()[-1].endswith("--samples-per-step 60")
    rows = json.loads(run(*SIMULATE, "--samples-per-step", "60", "--json")[1])
    held = {row["policy"]: row["samples_per_update_step"] for row in rows}
    assert f"{held['dual']:.1f} samples on average" in said
    assert held["dual"] != held["equal_token"]


def test_report_prints_its_files(run, files):
    status, out, err = run(*REPORT)
    assert status == 0
    assert out.splitlines()[0] == "out/report.html"
    assert "out/report_pictures/ranks.png" in out.splitlines()
    assert all((files / name).is_file() for name in out.splitlines())
    assert "adaptiveload: warning: metrics.jsonl line 3 is left out" in err
    assert err.splitlines()[-1].startswith("next: python -m webbrowser ")


@pytest.mark.parametrize("command", [PLAN, SIMULATE])
def test_json_is_all_of_stdout(run, command):
    status, out, _ = run(*command, "--json")
    assert status == 0
    assert json.loads(out)


def test_the_list_of_commands_says_each_in_a_whole_sentence(run):
    listed = run("--help")[1].partition("Commands:")[2].strip().splitlines()
    assert len(listed) == 7 and all(line.endswith(".") and not line.endswith("...") for line in listed), listed


@pytest.mark.parametrize("command", ["scan", "fit", "count", "plan", "simulate", "report", "push"])
def test_help_shows_an_example(run, command):
    status, out, _ = run(command, "--help")
    assert status == 0
    assert f"Example:\n    adaptiveload {command} " in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "nowhere", "--shapes", "shapes.json"), "There is no folder nowhere, and a Hub id would read"),
        (("plan", "config", "--dataset", "nowhere"), "There is no nowhere. Give a folder, tar shards, or the Hub id"),
        (("plan", "config", "--shapes", "nowhere.json"), "There is no file nowhere.json"),
        ((*PLAN, "--memory-limit-gib", "4"), "21x60x104"),
        ((*PLAN[:-1], "512"), "512 ranks"),
        ((*PLAN, "--policy", "best"), "best"),
        ((*SIMULATE, "--policy", "best"), "best"),
        (
            (*SIMULATE, "--balance", "even"),
            "balance is none, step, stratified:n (such as stratified:8), window:n or auto, but found 'even'",
        ),
        ((*PLAN, "--policy", "fixed"), "--policy fixed takes the config's own batch sizes"),
        ((*SIMULATE, "--policy", "dual", "--policy", "fixed"), "has none. Take dual, equal_token or equal_time."),
        (("scan", "prepared", "--patch-size", "0x0x0"), "A patch size is three whole numbers from 1 to 1024"),
        ((*COUNT, "--batch-size", "1x2x2=1", "--batch-size", "1x2x2=2"), "given twice for 1x2x2: 1 and 2. Keep one."),
        ((*COUNT, "--batch-size", f"1x2x2={'9' * 5000}"), "takes a shape and a number"),
        (
            (*PLAN, "--samples-per-step", "9", "--target-seconds", "2"),
            "--samples-per-step is a number above 0 by which",
        ),
        (("plan", "config", "--shapes", "longer.json", "--world-size", "4"), "or pass --allow-extrapolation to trust"),
        (("fit", "nowhere.jsonl", "--output", "fitted"), "measurements.jsonl, but nowhere.jsonl is no file"),
        (("fit", ".", "--output", "fitted"), "measurements.jsonl, but . is no file"),
        ((*FIT, "--patch-size", "1x1x1"), "1x60x104 was measured with 1560 tokens, but patch size"),
        ((*REPORT[:5], "config", *REPORT[6:]), "holds no metrics.jsonl"),
        (("plan", "fitted-without-environment", "--shapes", "shapes.json"), "Pass --world-size"),
        ((*FIT[:-1], "shapes.json/config"), "Not a directory: 'shapes.json/config'. Give another path"),
        ((*REPORT[:-1], "run"), "The page is one file, but run is a folder. Give a name"),
        ((*REPORT[:-1], "/proc/nowhere/report.html"), "No such file or directory: '/proc/nowhere'. Give another path"),
    ],
)
def test_a_mistake_is_one_line_and_status_1(run, files, arguments, words):
    if not (files / "fitted-without-environment").exists():
        make_config(environment={}).save_pretrained(files / "fitted-without-environment")
    (files / "longer.json").write_text('{"81x60x104": 9}')
    status, out, err = run(*arguments)
    assert (status, out) == (1, "")
    assert "adaptiveload: error: " in err
    assert words in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"21x60x104": ', "is no JSON"),
        ("[1]", "must hold a JSON object with shapes"),
        ("{}", "must hold a JSON object with shapes"),
        ('{"21x60x104": 0}', "the samples of 21x60x104 must be a positive whole number, below 2^31, but are 0"),
        ('{"21x60x104": 2147483648}', "below 2^31, but are 2147483648"),
        ('{"60x104": 3}', "Write a still as '1x60x104'"),
        ('{"1x60x104": 3, "1x60x104": 4}', "has 1x60x104 twice in one object"),
        ("[" * 100_000, "is no JSON"),
        *(
            (
                f'{{"shapes": {{"1x60x104": 30}}, "vae_scale": {scale}}}',
                "vae_scale is two whole numbers such as [4, 8]",
            )
            for scale in ("null", "[4]", '"xy"', "[4, 1e999]", "[0, 8]")
        ),
    ],
)
def test_a_file_of_shapes_that_cannot_be_used_is_named(run, files, content, words):
    (files / "bad.json").write_text(content)
    status, _, err = run("plan", "config", "--shapes", "bad.json")
    assert status == 1
    assert words in err


def test_a_full_disk_is_one_line_and_status_1(run):
    with files_of_at_most(100):
        status, _, err = run(*REPORT)
    assert status == 1
    said = err.splitlines()[-1]
    assert re.fullmatch(r"adaptiveload: error: .*File too large.* Make room, or give a path on another disk\.", said)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "config"), "give either --dataset DATASET or --shapes FILE"),
        ((*PLAN, "--shapes", "shapes.json"), "give either"),
        ((*PLAN, "--target-seconds", "soon"), "a number or auto, not 'soon'"),
        ((*FIT, "--patch-size", "2x2"), "three numbers such as 1x2x2, not '2x2'"),
        (("fit", "measurements.jsonl"), "--output"),
        ((*PLAN, "--world-size", "0"), "--world-size"),
        (("train",), "train"),
    ],
)
def test_wrong_usage_is_status_2(run, arguments, words):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert words in err


def test_only_a_plans_options_that_the_command_has_are_named_as_its_flags():
    said = "batch_sizes={...}, world_size=2, `--world_size`, run.world_size, world_size.x, world_size/a, 'world_size'"
    with pytest.raises(UserError) as caught, options_as_flags(["world_size", "rank"], dash="-"):
        raise UserError(said)
    assert str(caught.value) == said.replace(" world_size=2", " --world-size=2")
