"""Does the report show fit, plan, load and loss in one harmless file, and does it name what it could not read?"""

import base64
import io
import json
import re
import tracemalloc

import numpy as np
import pytest
from support.measured import ENVIRONMENT, make_config, measure

from adaptiveload_hf import BucketConfig, LatentShape, UserError
from adaptiveload_hf.buckets.cost import Additive, PowerLaw
from adaptiveload_hf.buckets.schedule import schedule_epoch
from adaptiveload_hf.buckets.simulate import simulate
from adaptiveload_hf.fit_figures import fit_png
from adaptiveload_hf.load_figures import ranks_png
from adaptiveload_hf.report import read_metrics, write_report

SAMPLES = {"1x60x104": 300, "5x60x104": 90, "13x60x104": 40, "21x60x104": 30}
COUNTS = {LatentShape.parse(shape): count for shape, count in SAMPLES.items()}
RANKS = {"world_size": 4, "gradient_accumulation_steps": 2}
HOSTILE = '<img src="http://x/y.png" onerror="alert(1)">&'


def write_metrics(folder, lines):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def metrics(steps):
    live = {"seconds": 2.0, "data_wait_seconds": 0.1, "samples_per_second": 9.5, "balance_efficiency": 0.97}
    return [json.dumps({"step": step, "loss": 1 / step, **live}) for step in range(1, steps + 1)]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(the page, its files, problems) of a run with hostile words and a truncated last line."""
    folder = tmp_path_factory.mktemp("report")
    lines = [*metrics(30), json.dumps({"step": HOSTILE, "loss": 1}), '{"step": 31, "lo']
    config = make_config(environment={**ENVIRONMENT, "gpu": HOSTILE})
    output = folder / "new" / "report.html"
    files, problems = write_report(
        output, config, COUNTS, run=write_metrics(folder / "run <b>", lines), vae_scale=(4, 8), **RANKS
    )
    return output.read_text(), files, problems


def pictures(files):
    from matplotlib.image import imread

    return {path.stem: imread(io.BytesIO(path.read_bytes())) for path in files if path.suffix == ".png"}


def test_the_report_is_one_file_without_scripts_or_links(written):
    page, files, _ = written
    assert "<script" not in page
    assert re.findall(r"<(?:img|link|iframe)[^>]*>", page) == re.findall(
        r'<img alt="[^"]+" src="data:image/png[^>]*>', page
    )
    encoded = re.findall(r'base64,([^"]+)"', page)
    assert [base64.b64decode(found) for found in encoded] == [path.read_bytes() for path in files[1:]]
    assert {path.parent.name for path in files[1:]} == {"report_pictures"}


def test_words_of_others_are_escaped(written):
    page, _, problems = written
    assert HOSTILE not in page
    assert "&lt;img src=&quot;http://x/y.png&quot; onerror=&quot;alert(1)&quot;&gt;&amp;" in page
    assert "run &lt;b&gt;" in page
    assert any(HOSTILE in problem for problem in problems)


def test_every_picture_shows_something(written):
    drawn = pictures(written[1])
    assert list(drawn) == ["ranks", "buckets", "fit", "errors", "run"]
    for name, picture in drawn.items():
        assert min(picture.shape[:2]) > 200
        assert len({tuple(pixel) for pixel in picture[::3, ::3].reshape(-1, picture.shape[2])}) > 20, name
        assert 0.02 < (picture[..., :3].min(axis=2) < 0.9).mean() < 0.9, name  # neither blank nor full


def test_a_law_that_misses_hides_no_point_beyond_the_edge_of_its_panel(monkeypatch):
    monkeypatch.setattr("adaptiveload_hf.fit_figures.to_png", lambda figure: figure)
    laws = {"power_law": PowerLaw(0.0, 1e-7, 1.0), "additive": Additive(100.0, 0.0, 0.0, 1e-3)}
    for axis in fit_png(measure(), laws, "additive").axes[:2]:
        points = axis.collections[-1].get_offsets()
        assert len(points) == len(measure())
        assert (points > (axis.get_xlim()[0], axis.get_ylim()[0])).all()
        assert (points < (axis.get_xlim()[1], axis.get_ylim()[1])).all()


def test_shapes_of_one_length_share_a_colour_and_are_both_named(monkeypatch):
    monkeypatch.setattr("adaptiveload_hf.load_figures.to_png", lambda figure: figure)
    counts = {LatentShape.parse(shape): 40 for shape in ("1x60x104", "1x104x60", "5x60x104")}
    plan = make_config().plan(counts, **RANKS)
    buckets = np.repeat(np.arange(3), 40)
    schedule = schedule_epoch(buckets, plan, make_config().cost_model, balance="none", **RANKS)
    figure = ranks_png({"Before": schedule}, plan.shapes, [b.tokens for b in plan.buckets], "seconds")
    assert [label.get_text() for label in figure.axes[-1].get_yticklabels()] == ["1x60x104\n1x104x60", "5x60x104"]


def test_lanes_of_different_samples_say_how_many_they_hold_and_how_long_the_epoch_takes(monkeypatch):
    monkeypatch.setattr("adaptiveload_hf.load_figures.to_png", lambda figure: figure)
    counts, cost = (
        {LatentShape.parse(shape): 200 * count for shape, count in SAMPLES.items()},
        make_config().cost_model,
    )
    plans = [make_config().plan(counts, policy=policy, **RANKS) for policy in ("equal_token", "dual")]
    buckets = np.repeat(np.arange(len(counts)), [bucket.count for bucket in plans[0].buckets])
    schedules = [schedule_epoch(buckets, plan, cost, balance="none", **RANKS) for plan in plans]
    figure = ranks_png(dict(zip("AB", schedules)), plans[0].shapes, [b.tokens for b in plans[0].buckets], "seconds")
    held = [int(schedule.sizes[: 50 * RANKS["world_size"]].sum()) for schedule in schedules]
    assert held[0] != held[1]
    for axis, samples, schedule in zip(figure.axes, held, schedules):
        assert axis.get_xlabel() == (
            f"predicted seconds of the first 50 micro-steps, which hold {samples:,} samples "
            f"(the whole epoch: {simulate(schedule).epoch_seconds:.4g} seconds)"
        )


def test_waiting_is_less_grey_after_than_before(written):
    lanes = pictures(written[1])["ranks"][..., :3]
    grey = (np.abs(lanes - 0.82) < 0.01).all(axis=2)
    half = len(lanes) // 2
    assert grey[:half].sum() > 3 * grey[half:].sum() > 0


def test_the_page_tells_a_newcomer_what_was_gained_and_what_its_words_mean(written):
    page = written[0]
    facts = re.search(r'<div class="facts">.*?</div></div>', page).group()
    assert re.search(r"<b>1\.\d\dx</b>the speed of before", facts)
    assert re.search(r"<b>\d+% to \d%</b>of the ranks' time is waiting", facts)
    assert "Panels that stop after 50 micro-steps hold different samples: the table below compares" in page
    for word in ("shape", "bucket", "micro-batch, B", "micro-step", "optimizer step"):
        assert f"<dt>{word}</dt>" in page


def test_the_tables_hold_the_plan_and_both_schedules(written):
    page = written[0]
    for shape, count in SAMPLES.items():
        assert re.search(rf"<tr><td>{shape}</td><td>\d+x480x832</td><td>[\d,]+</td><td>{count}</td>", page)
    rows = re.findall(r"<td>(Before|After)[^<]*</td><td>[\d.]+</td><td>([\d.]+)%</td>", page)
    efficiency = {name: float(percent) for name, percent in rows}
    assert efficiency["After"] > efficiency["Before"]


def test_bad_lines_of_the_metrics_are_named_and_the_rest_is_drawn(written):
    page, _, problems = written
    assert "30 optimizer steps" in page
    assert problems[1] == "metrics.jsonl line 32 is left out: it is no whole JSON"
    assert problems[1] in page


def test_a_config_learnt_from_a_run_is_shown_as_such_and_without_a_run_the_rest_is(tmp_path):
    learnt = BucketConfig(**{**make_config().config, "origin": "training_log"}, measurements=measure())
    files, _ = write_report(tmp_path / "report.html", learnt, COUNTS, memory_limit_gib=9.5, **RANKS)
    page = files[0].read_text()
    assert "The run so far" not in page and "learnt from a run on NVIDIA H200" in page
    assert "Laws were fitted to the optimizer steps of a training run" in page
    assert list(pictures(files)) == ["ranks", "buckets", "fit", "errors"]
    assert page.count("<td>memory</td></tr>") == len(COUNTS)


@pytest.mark.parametrize(
    ("environment", "words"), [({}, "Model measured."), ({"gpu": None}, "Model measured on CPU.")]
)
def test_the_report_names_only_hardware_that_the_config_names(tmp_path, environment, words):
    files, _ = write_report(tmp_path / "report.html", make_config(environment), COUNTS, **RANKS)
    assert words in files[0].read_text()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"step": 2, "los', "it is no whole JSON"),
        ("[2, 0.5]", "it is no JSON object"),
        ('{"step": 2}', "loss is None, not a finite number below 1e+12"),
        ('{"step": 2, "loss": NaN}', "loss is nan, not a finite number below 1e+12"),
        ('{"step": true, "loss": 1}', "step is True, not a finite number below 1e+12"),
        ('{"step": 2, "loss": -1e308}', "loss is -1e+308, not a finite number below 1e+12"),
        ('{"step": 2, "loss": 1%s}' % ("0" * 400), f"loss is 1{'0' * 400}, not a finite number below 1e+12"),
        ("[" * 100_000, "it is no whole JSON"),
    ],
)
def test_a_line_that_is_no_point_of_the_curve_is_named(tmp_path, line, reason):
    run = write_metrics(tmp_path, ['{"step": 1, "loss": 1}', line, "", '{"step": 3, "loss": 0.5}'])
    records, problems = read_metrics(run / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 3]
    assert problems == [f"metrics.jsonl line 2 is left out: {reason}"]


def test_of_steps_that_a_resumed_run_repeated_the_last_counts(tmp_path):
    run = write_metrics(tmp_path, [*metrics(4), '{"step": 3, "loss": 9}', '{"step": 4, "loss": 8}'])
    records, problems = read_metrics(run / "metrics.jsonl")
    assert [(record["step"], record["loss"]) for record in records] == [(1, 1), (2, 0.5), (3, 9), (4, 8)]
    assert not problems


def test_of_a_long_run_of_many_ranks_only_what_is_drawn_is_held(tmp_path):
    micro_batches = json.dumps([[{"shape": "21x60x104", "batch_size": rank} for rank in range(64)]])
    lines = [f'{line[:-1]}, "micro_batches": {micro_batches}}}' for line in metrics(300)]
    path = write_metrics(tmp_path, lines) / "metrics.jsonl"
    tracemalloc.start()
    records, _ = read_metrics(path)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(records) == 300 and held < path.stat().st_size / 2


def test_a_page_in_a_folders_place_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (".", "/", tmp_path):
        with pytest.raises(UserError, match=r"The page is one file, but .* is a folder\. Give a name in it"):
            write_report(folder, make_config(), COUNTS, **RANKS)
    assert not list(tmp_path.iterdir())


def test_a_folder_without_metrics_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"holds no metrics\.jsonl"):
        write_report(tmp_path / "report.html", make_config(), COUNTS, run=tmp_path, **RANKS)
    assert not (tmp_path / "report.html").exists()


def test_metrics_without_a_usable_line_are_an_error(tmp_path):
    with pytest.raises(UserError, match=r"holds no usable line\. metrics\.jsonl line 1 is left out"):
        read_metrics(write_metrics(tmp_path, ["{"]) / "metrics.jsonl")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("adaptiveload_hf.figures.can_draw", lambda: False)
    with pytest.raises(UserError, match=r"Pictures need matplotlib.*pip install matplotlib"):
        write_report(tmp_path / "report.html", None, COUNTS, **RANKS)
