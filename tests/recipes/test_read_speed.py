"""Does recipes/read_speed.py run, and do its committed numbers hold what the package promises?"""

import json
from pathlib import Path

import read_speed

RESULT = Path(__file__).parents[2] / "recipes" / "results" / "read_speed_cpu.json"


def test_it_measures_every_source(tmp_path, monkeypatch, capsys):
    output = tmp_path / "result.json"
    arguments = [
        "read_speed.py",
        "--rows",
        "2000",
        "--samples",
        "12",
        "--clips",
        "8",
        "--workers",
        "1",
        "--output",
        str(output),
    ]
    monkeypatch.setattr("sys.argv", arguments)
    read_speed.main()
    found = json.loads(output.read_text())
    assert found["seconds"].keys() == json.loads(RESULT.read_text())["seconds"].keys()
    assert all(value > 0 for value in [*found["seconds"].values(), *found["megabytes_per_second"].values()])
    assert len(capsys.readouterr().out.splitlines()) == len(found["seconds"]) + 2


def test_the_committed_numbers_keep_the_promises():
    result = json.loads(RESULT.read_text())
    assert all(result[key] for key in ("machine", "python", "datasets", "torch", "date", "command"))
    assert result["rows"] == 1_000_000 and result["samples"] == 10_000
    times = result["seconds"]
    assert times["table"] <= 1.5 and times["table_filtered_shuffled_selected"] <= 6
    assert times["table_shuffled"] <= 6 and times["folder"] <= 2


def test_workers_read_a_prepared_dataset_at_80_percent_of_the_disks_rate():
    rates = json.loads(RESULT.with_name("read_speed_32_cores.json").read_text())["megabytes_per_second"]
    assert rates["loaded"] >= 0.8 * rates["sequential"]
