"""Does the report show fit, plan, load and loss in one harmless file, and does it name what it could not read?"""

import base64
import io
import json
import re

import pytest
from support.measured import ENVIRONMENT, make_config

from adaptiveload_hf import LatentShape, UserError
from adaptiveload_hf.buckets.shapes import index_shapes
from adaptiveload_hf.report import read_metrics, write_report

COUNTS = {"1x60x104": 300, "5x60x104": 90, "13x60x104": 40, "21x60x104": 30}
RANKS = {"world_size": 4, "gradient_accumulation_steps": 2}
HOSTILE = '<img src="http://x/y.png" onerror="alert(1)">&'


def index():
    shapes = [LatentShape.parse(shape) for shape, count in COUNTS.items() for _ in range(count)]
    return index_shapes([(shape.frames, shape.height, shape.width) for shape in shapes])


def write_metrics(folder, lines):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def metrics(steps):
    return [json.dumps({"step": step, "loss": 1 / step}) for step in range(1, steps + 1)]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(the page, problems) of a run with hostile words and a truncated last line."""
    folder = tmp_path_factory.mktemp("report")
    run = write_metrics(
        folder / "run <b>", [*metrics(30), json.dumps({"step": HOSTILE, "loss": 1}), '{"step": 31, "lo']
    )
    config = make_config(environment={**ENVIRONMENT, "gpu": HOSTILE})
    problems = write_report(folder / "new" / "report.html", config, index(), run=run, **RANKS)
    return (folder / "new" / "report.html").read_text(), problems


def pictures(page):
    from matplotlib.image import imread

    return [imread(io.BytesIO(base64.b64decode(found))) for found in re.findall(r'base64,([^"]+)"', page)]


def test_the_report_is_one_file_without_scripts_or_links(written):
    page, _ = written
    assert "<script" not in page
    assert re.findall(r"<(?:img|link|iframe)[^>]*>", page) == re.findall(
        r'<img alt="[^"]+" src="data:image/png[^>]*>', page
    )
    assert len(re.findall("<img ", page)) == 3


def test_words_of_others_are_escaped(written):
    page, problems = written
    assert HOSTILE not in page
    assert "&lt;img src=&quot;http://x/y.png&quot; onerror=&quot;alert(1)&quot;&gt;&amp;" in page
    assert "run &lt;b&gt;" in page
    assert any(HOSTILE in problem for problem in problems)


def test_every_picture_shows_something(written):
    for picture in pictures(written[0]):
        assert min(picture.shape[:2]) > 200
        assert len({tuple(pixel) for pixel in picture[::5, ::5].reshape(-1, picture.shape[2])}) > 20


def test_the_tables_hold_the_plan_and_both_schedules(written):
    page, _ = written
    for shape, count in COUNTS.items():
        assert re.search(rf"<tr><td>{shape}</td><td>\d+x480x832</td><td>[\d,]+</td><td>{count}</td>", page)
    rows = re.findall(r"<td>(before|after)[^<]*</td><td>[\d.]+</td><td>([\d.]+)%</td>", page)
    efficiency = {name: float(percent) for name, percent in rows}
    assert efficiency["after"] > efficiency["before"]


def test_bad_lines_of_the_metrics_are_named_and_the_rest_is_drawn(written):
    page, problems = written
    assert "30 optimizer steps" in page
    assert problems[1] == "metrics.jsonl line 32 is left out: it is no whole JSON"
    assert problems[1] in page


def test_without_a_run_the_rest_is_shown(tmp_path):
    write_report(tmp_path / "report.html", make_config(), index(), **RANKS)
    page = (tmp_path / "report.html").read_text()
    assert "No run was given." in page
    assert len(pictures(page)) == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"step": 2, "los', "it is no whole JSON"),
        ("[2, 0.5]", "it is no JSON object"),
        ('{"step": 2}', "loss is None, not a finite number"),
        ('{"step": 2, "loss": NaN}', "loss is nan, not a finite number"),
        ('{"step": true, "loss": 1}', "step is True, not a finite number"),
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


def test_a_folder_without_metrics_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"holds no metrics\.jsonl"):
        write_report(tmp_path / "report.html", make_config(), index(), run=tmp_path, **RANKS)
    assert not (tmp_path / "report.html").exists()


def test_metrics_without_a_usable_line_are_an_error(tmp_path):
    with pytest.raises(UserError, match=r"holds no usable line\. metrics\.jsonl line 1 is left out"):
        read_metrics(write_metrics(tmp_path, ["{"]) / "metrics.jsonl")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("adaptiveload_hf.figures.can_draw", lambda: False)
    with pytest.raises(UserError, match=r"pip install adaptiveload_hf\[recipes\]"):
        write_report(tmp_path / "report.html", None, index(), **RANKS)
