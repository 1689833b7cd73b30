"""Which rows and files of a folder are samples, and is everything else named?"""

import errno
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from data_folder import list_samples
from PIL import Image

from adaptiveload_hf import UserError


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    for name in ("a.png", "b.png", "sub/a.png"):
        Image.new("RGB", (8, 8)).save(folder / name)
    return folder


def refused(listing):
    return {entry["file"]: entry["reason"] for entry in listing.refused}


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))


def test_a_csv_of_windows_is_read_and_each_bad_line_is_named(root):
    lines = ["file_name,text", 'a.png,"one, with a comma', 'and a line break"', "b.png,two,three", "sub\\a.png,zwei"]
    lines += ["../a.png,out", "a.png,again", "gone.png,x", "b.png,schön"]
    content = "\r\n".join(lines).encode("utf-8-sig") + b"\r\nb.png,caf\xe9\r\n\r\n"
    (root / "metadata.csv").write_bytes(content + b'c.png,"never closed\r\nb.png,lost')
    listing = list_samples(root)
    assert listing.captions == {
        "a.png": "one, with a comma\r\nand a line break",
        "sub/a.png": "zwei",
        "b.png": "schön",
    }
    assert refused(listing) == {
        "metadata.csv:4": "it has 3 fields, but the first line has 2",
        "metadata.csv:6": "../a.png leads out of the folder; only files in it are read",
        "metadata.csv:7": "a.png has a row already, at metadata.csv:2; that one counts",
        "metadata.csv:8": "no picture or clip gone.png is in the folder",
        "metadata.csv:10": "it is not UTF-8; save the file as UTF-8",
        "metadata.csv:12": "it is no CSV, and perhaps what follows is lost with it: unexpected end of data",
    }


def test_metadata_files_of_all_kinds_and_folders_are_read_together(root):
    write(
        root / "metadata.jsonl", '{"file_name": "a.png", "text": "one"}\n{"file_name": "sub/a.png", "text": "two"}\n'
    )
    write(root / "sub/metadata.csv", "file_name,text\na.png,other\n")
    pyarrow.parquet.write_table(
        pyarrow.table({"file_name": ["b.png", "c.png"], "text": ["three", None]}), root / "metadata.parquet"
    )
    listing = list_samples(root)
    assert listing.captions == {"a.png": "one", "sub/a.png": "two", "b.png": "three"}
    assert refused(listing) == {
        "sub/metadata.csv:2": "sub/a.png has a row already, at metadata.jsonl:2; that one counts",
        "metadata.parquet:2": "no picture or clip c.png is in the folder",
    }


def test_other_columns_are_read_when_they_are_named_and_asked_for_when_not(root):
    write(root / "metadata.csv", "video,prompt\na.png,one\nb.png,two\nsub/a.png,three\n")
    assert list(list_samples(root, "video", "prompt").captions.values()) == ["one", "two", "three"]
    with pytest.raises(UserError, match=r"gives no sample a 'text', .*\['prompt', 'video'\]. Say with --caption_col"):
        list_samples(root, "video")
    with pytest.raises(
        UserError, match=r"metadata.csv has no column 'file_name', but \['prompt', 'video'\]. Say with --v"
    ):
        list_samples(root)
    (root / "metadata.csv").unlink()
    write(root / "metadata.parquet", "no parquet")
    with pytest.raises(UserError, match="is no whole parquet file"):
        list_samples(root)


def test_a_name_in_other_letters_or_another_form_is_not_passed_over(root):
    """As a disk that knows no letter case, or macOS, may leave them: without captions nobody would notice."""
    write(root / "sub/a.Txt", "from a camera")
    Image.new("RGB", (8, 8)).save(root / "Cafe\u0301.png")
    write(root / "Caf\u00e9.txt", "composed")
    assert list_samples(root).captions == {
        "Cafe\u0301.png": "composed",
        "a.png": "",
        "b.png": "",
        "sub/a.png": "from a camera",
    }
    write(root / "METADATA.CSV", "file_name,text\na.png,one\n")
    assert list_samples(root).captions == {"a.png": "one"}


def test_folders_that_a_system_keeps_for_itself_hold_no_samples(root):
    for name in ("@eaDir/a.png", "#recycle", "sub/$RECYCLE.BIN", ".Trash-0/files"):
        (root / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(root / name / "thumbnail_or_deleted.png")
    listing = list_samples(root)
    assert set(listing.captions) == {"a.png", "b.png", "sub/a.png"}
    assert (listing.hidden, listing.refused) == (4, [])


def test_two_columns_of_one_name_are_refused_and_nameless_ones_not(root):
    write(root / "metadata.csv", "file_name,text,text\na.png,one,\n")
    with pytest.raises(UserError, match=r"metadata.csv has more than one column 'text'. Rename or remove the others"):
        list_samples(root)
    write(root / "metadata.csv", "file_name,text,,\na.png,one,,\n")
    assert list_samples(root).captions == {"a.png": "one"}


def test_a_number_too_long_to_read_a_key_twice_and_text_that_is_no_utf8_cost_their_rows_alone(root):
    rows = [f'{{"file_name": "a.png", "n": {"9" * 5000}}}', '{"file_name": "b.png", "text": "x"}']
    rows += ['{"file_name": "a.png", "text": "which", "text": "one?"}']
    write(root / "metadata.jsonl", "\n".join(rows))
    table = pyarrow.table({"file_name": ["a.png", "sub/a.png"], "text": ["good", "BAD."]})
    pyarrow.parquet.write_table(table, root / "metadata.parquet", use_dictionary=False)
    content = (root / "metadata.parquet").read_bytes()
    (root / "metadata.parquet").write_bytes(content.replace(b"BAD.", b"BAD\xff"))
    listing = list_samples(root)
    assert listing.captions == {"b.png": "x", "a.png": "good"}
    found = refused(listing)
    assert found["metadata.jsonl:1"].startswith("its JSON cannot be read: Exceeds the limit (4300 digits)")
    assert found["metadata.jsonl:3"] == "its JSON cannot be read: it has the key 'text' more than once"
    assert found["metadata.parquet:2"] == "it is not UTF-8; write the file anew from text that is"


@pytest.mark.parametrize("at", [0.2, 0.6])
def test_a_damaged_parquet_file_is_named(root, at):
    table = pyarrow.table({"file_name": [f"{n}.png" for n in range(1000)]})
    pyarrow.parquet.write_table(table, root / "metadata.parquet")
    content = bytearray((root / "metadata.parquet").read_bytes())
    place = int(at * len(content))
    content[place : place + 400] = bytes(400)
    (root / "metadata.parquet").write_bytes(content)
    with pytest.raises(UserError, match=r"metadata.parquet is no whole parquet file: "):
        list_samples(root)


def test_a_metadata_file_that_cannot_be_read_is_named(root):
    (root / "metadata.csv").symlink_to("nowhere.csv")
    with pytest.raises(UserError, match=r"metadata.csv cannot be read: No such file or directory"):
        list_samples(root)
    (root / "metadata.csv").unlink()
    os.mkfifo(root / "metadata.csv")
    with pytest.raises(UserError, match=r"metadata.csv is no file"):
        list_samples(root)


def test_a_text_that_is_no_file_is_not_waited_for(root):
    os.mkfifo(root / "a.txt")
    (root / "b.txt").symlink_to("nowhere.txt")
    listing = list_samples(root)
    assert list(listing.captions) == ["sub/a.png"]
    assert set(refused(listing).values()) == {"its .txt is no file that can be read"}


def test_a_text_beside_the_file_is_its_caption_in_either_case_and_where_the_row_has_none(root):
    write(root / "a.TXT", "from DOS\r\n")
    write(root / "sub/a.txt", "beside")
    assert list_samples(root).captions == {"a.png": "from DOS", "b.png": "", "sub/a.png": "beside"}
    write(root / "metadata.csv", "file_name,text\na.png,\nb.png,two\nsub/a.png, \n")
    assert list_samples(root).captions == {"a.png": "from DOS", "b.png": "two", "sub/a.png": "beside"}


def test_a_row_may_name_its_file_by_the_whole_path(root, tmp_path, monkeypatch):
    write(root / "metadata.csv", f"file_name,text\n{root}/a.png,one\n{root}/sub/../b.png,two\n{tmp_path}/x.png,out\n")
    monkeypatch.chdir(root.parent)
    for folder in (root, Path(root.name)):
        listing = list_samples(folder)
        assert listing.captions == {"a.png": "one", "b.png": "two"}
        assert refused(listing)["metadata.csv:4"].startswith(f"{tmp_path}/x.png leads out of the folder")


def test_a_row_that_is_no_text_is_named(root):
    rows = ['{"file_name": 3}', '{"video": "a.png"}', '{"file_name": "a.png", "text": ["x"]}', "[" * 100_000]
    rows += ['{"file_name": "a.png", "text": "\\ud800"}', '{"file_name": "b.png", "text": "good"}']
    write(root / "metadata.jsonl", "\n".join(rows))
    listing = list_samples(root)
    assert listing.captions == {"b.png": "good"}
    found = refused(listing)
    assert (
        found["metadata.jsonl:1"]
        == "it must have a string \"file_name\", but it has ['file_name']; see --video_column"
    )
    assert found["metadata.jsonl:2"].startswith("it must have a string \"file_name\", but it has ['video']")
    assert found["metadata.jsonl:3"] == "its \"text\" must be a string, but it is ['x']"
    assert found["metadata.jsonl:4"].startswith(("its JSON is nested too deeply", "it is not JSON"))
    assert found["a.png"] == "its caption has half a character, which is no text"


def test_names_in_any_script_and_form_are_found(root, capsys):
    for name in ("猫 跳.png", "line\nbreak.png", "schön.png", "%s#?&.png"):
        Image.new("RGB", (8, 8)).save(root / name)
    Image.new("RGB", (8, 8)).save(root / "Cafe\u0301.png")  # as macOS stores it
    os.rename(root / "b.png", os.fsencode(root) + b"/\xff.png")
    names = ["猫 跳.png", "line\\nbreak.png", "schön.png", "%s#?&.png", "Caf\u00e9.png"]
    write(root / "metadata.jsonl", "\n".join(f'{{"file_name": "{name}", "text": "x"}}' for name in names))
    listing = list_samples(root)
    assert set(listing.captions) == {"猫 跳.png", "line\nbreak.png", "schön.png", "%s#?&.png", "Cafe\u0301.png"}
    assert refused(listing)[r"'\udcff.png'"] == "its name is not UTF-8; rename it"
    assert r"refused '\udcff.png'" in capsys.readouterr().err
    os.rename(os.fsencode(root) + b"/\xff.png", root / "new\nline.png")
    list_samples(root)
    assert r"refused 'new\nline.png': metadata.jsonl has no row for it" in capsys.readouterr().err


def test_a_folder_that_cannot_be_read_is_named(root, monkeypatch):
    def scandir(folder, listing=os.scandir):
        if Path(folder).name == "sub":  # root, as whom tests may run, can read all
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return listing(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    listing = list_samples(root)
    assert set(listing.captions) == {"a.png", "b.png"}
    assert refused(listing) == {"sub": "it cannot be read: Permission denied"}


def test_links_to_files_are_followed_and_links_to_folders_named(root, tmp_path):
    outside = tmp_path / "blobs"
    outside.mkdir()
    Image.new("RGB", (8, 8)).save(outside / "0123.png")
    (root / "linked.png").symlink_to(outside / "0123.png")
    (root / "folder").symlink_to(outside)
    (root / "loop").symlink_to(root)
    (root / "broken.png").symlink_to("nowhere.png")
    os.mkfifo(root / "pipe.png")
    listing = list_samples(root)
    assert set(listing.captions) == {"a.png", "b.png", "sub/a.png", "linked.png"}
    link = "it is a link to a folder, which is not followed"
    assert refused(listing) == {
        "folder": link,
        "loop": link,
        "broken.png": "it cannot be read: No such file or directory",
        "pipe.png": "it is no file",
    }


def test_metadata_that_names_no_file_says_what_it_has(root, capsys):
    write(root / "metadata.csv", "file_name;text\na.png;one\nb.png;two\n")
    with pytest.raises(UserError, match=r"no column 'file_name', but \['file_name;text'\].*; commas separate"):
        list_samples(root)
    assert capsys.readouterr().err == ""  # not the same of each of a thousand rows
    (root / "metadata.csv").unlink()
    write(root / "metadata.jsonl", '{"video": "a.png", "text": "one"}\n')
    with pytest.raises(UserError, match=r"names no file: no row has a 'file_name', but they have \['text', 'video'\]"):
        list_samples(root)
    write(root / "metadata.jsonl", '[\n {"file_name": "a.png"},\n {"file_name": "b.png"}\n]\n')
    with pytest.raises(UserError, match=r"metadata.jsonl is a JSON list, but each of its lines must be an object"):
        list_samples(root)


def test_captions_that_are_named_like_no_sample_are_listed(root):
    for name in ("a.txt", "b.png.txt", "prompts.txt", "sub/b.TXT"):
        write(root / name, "a caption")
    (root / os.fsdecode(b"\xff.txt")).touch()
    listing = list_samples(root)
    assert listing.captions == {"a.png": "a caption", "b.png": "", "sub/a.png": ""}
    assert listing.texts_without_file == ["b.png.txt", "prompts.txt", "sub/b.TXT", "\\xff.txt"]
