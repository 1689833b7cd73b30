"""Is the matrix in docs/patching.md whole, and each row of it one that a test records?"""

import re
from pathlib import Path

from support import compositions


def test_the_docs_hold_every_row_and_no_other_and_no_cell_is_open():
    stated = compositions.documented()
    assert tuple(stated) == compositions.ROWS
    for row, cells in stated.items():
        assert tuple(cells) == compositions.COLUMNS
        assert set(cells.values()) <= {"all", "part", "eager", "stock", "fails unpatched too"}, row


def test_make_matrix_runs_the_oldest_release_that_setup_cfg_takes_and_the_pinned_one():
    root = Path(__file__).parents[2]
    releases = re.search(r"^DIFFUSERS := (.*)$", (root / "Makefile").read_text(), re.MULTILINE)[1].split()
    (floor,) = re.findall(r"^    diffusers>=(.*)$", (root / "setup.cfg").read_text(), re.MULTILINE)
    (pinned,) = re.findall(r"^diffusers==(.*)$", (root / ".ci" / "constraints.txt").read_text(), re.MULTILINE)
    assert len(releases) == 3
    assert releases[0] == f"{floor}.0" and releases[-1] == pinned
    assert f"diffusers {pinned} " in (root / "docs" / "models.md").read_text()


def test_every_row_is_named_in_a_test():
    folder = Path(__file__).parent
    files = [*folder.glob("test_composition_*.py"), folder.parent / "support" / "composition_ranks.py"]
    text = "".join(path.read_text() for path in files)
    built = {"gradient checkpointing", "selective checkpointing that keeps"}  # and what follows, from parameters
    for row in compositions.ROWS:
        assert f'"{row}"' in text or any(row.startswith(name) and name in text for name in built), row


def test_writing_the_matrix_replaces_what_was_recorded_and_keeps_the_rest(tmp_path, monkeypatch):
    page = tmp_path / "patching.md"
    page.write_text(compositions.DOCS.read_text())
    monkeypatch.setattr(compositions, "DOCS", page)
    before = compositions.documented()
    compositions.write_matrix({})
    assert compositions.documented() == before
    compositions.write_matrix({"DDP": {"Wan, patched first": "part"}})
    assert compositions.documented() == {**before, "DDP": {**before["DDP"], "Wan, patched first": "part"}}
    assert page.read_text().count("| DDP |") == 1
    assert len(page.read_text().splitlines()) == len(compositions.DOCS.read_text().splitlines())
