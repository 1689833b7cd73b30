"""Tar shards: every whole sample is found by its own key, what is not is named, and the index follows the shards."""

import gzip
import io
import os
import tarfile
import tracemalloc

import pyarrow
import pytest
import torch
from safetensors.torch import save
from support.caches import latent, sample_members, save_shard

from adaptiveload_hf.buckets.collate import BatchReader, Failure, collate_prepared
from adaptiveload_hf.buckets.shapes import dataset_fingerprint, read_shapes
from adaptiveload_hf.buckets.sources import load_tar_shards
from adaptiveload_hf.errors import UserError


def load(shards, **options):
    return load_tar_shards(shards, latent_normalized=True, **options)


def names(dataset):
    return dataset.select_columns("file")["file"][:]


def batch_of(dataset, *rows):
    batch = BatchReader(dataset, collate_prepared).__getitems__(list(rows))
    assert not isinstance(batch, Failure), batch
    return batch


def shard_of(path, *keys, frames=2):
    """A shard whose latents hold the position of their key."""
    members = {}
    for value, key in enumerate(keys):
        members |= sample_members(key, latent(frames, value))
    return save_shard(path, members)


def test_dots_in_keys_cut_nothing(tmp_path):
    keys = ["22.05", "22.06", "dir.v1/1.1", "dir.v1/1.2", "dir.v2/1.1", "a.json", "a", "a.latent", "x" * 150]
    shard_of(tmp_path / "0.tar", *keys)
    dataset, problems = load(tmp_path)
    assert problems == [] and names(dataset) == [f"0.tar/{key}" for key in keys]
    batch = batch_of(dataset, *range(len(keys)))
    assert batch["latent"][:, 0, 0, 0, 0].tolist() == list(range(len(keys)))
    assert batch["caption"] == [f"caption of {key}" for key in keys]


def test_indexing_holds_one_shard_at_a_time(tmp_path):
    def most_memory(shards):
        for number in range(shards):
            shard_of(tmp_path / str(shards) / f"{number}.tar", *map(str, range(200)))
        tracemalloc.start()
        try:
            assert len(load(tmp_path / str(shards))[0]) == 200 * shards
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    load(shard_of(tmp_path / "0.tar", "a"))  # what is imported and cached at the first time
    assert most_memory(20) < 2 * most_memory(1)


def test_equal_names_in_two_shards_are_two_samples(tmp_path):
    paths = [
        shard_of(tmp_path / name, "a", "b", frames=n) for n, name in ((1, "x/0.tar"), (2, "y/0.tar"), (3, "1.tar"))
    ]
    dataset, problems = load(reversed(paths))
    assert problems == []
    assert names(dataset) == ["1.tar/a", "1.tar/b", "x/0.tar/a", "x/0.tar/b", "y/0.tar/a", "y/0.tar/b"]
    index = read_shapes(dataset)
    assert [index.shapes[bucket].frames for bucket in index.bucket_of_sample] == [3, 3, 1, 1, 2, 2]
    assert batch_of(dataset, 4, 5)["latent"][:, 0, 0, 0, 0].tolist() == [0, 1]


def test_a_row_holds_the_json_and_every_tensor(tmp_path):
    content = latent(3)
    told = {"text": "said", "fps": 16, "tags": ["a"], "file": "no", "latent": "no"}
    embeds = torch.randn(5, 8)
    members = sample_members("k", content, told, prompt_embeds=embeds, latents_control=content + 1)
    save_shard(tmp_path / "0.tar", members)
    dataset, _ = load([tmp_path / "0.tar"], prompt_length=6)
    row = dataset[0]
    assert row["caption"] == "said" and row["fps"] == 16 and row["tags"] == ["a"] and row["file"] == "0.tar/k"
    assert row["latent_normalized"] is True and row["latent_shape"] == [4, 3, 4, 6]
    batch = batch_of(dataset, 0, 0)
    assert torch.equal(batch["latent"][1], content) and torch.equal(batch["latents_control"][0], content + 1)
    assert torch.equal(batch["prompt_embeds"][0], torch.cat([embeds, torch.zeros(1, 8)]))


@pytest.mark.parametrize("cut", ["in the data", "in a header", "between samples", "inside the first header"])
def test_a_truncated_last_shard_is_named_and_the_rest_kept(tmp_path, cut):
    shard_of(tmp_path / "0.tar", "a", "b")
    last = shard_of(tmp_path / "1.tar", "a", "b", "c")
    with tarfile.open(last) as tar:
        header = tar.getmember("c.latent.safetensors").offset
    keep = {"in the data": header + 600, "in a header": header + 100, "between samples": header}.get(cut, 100)
    os.truncate(last, keep)
    dataset, problems = load(tmp_path)
    kept = ["0.tar/a", "0.tar/b", "1.tar/a", "1.tar/b"]
    assert names(dataset) == (kept if keep > 100 else kept[:2])
    said = {
        "in the data": f"1.tar: cut short in c.latent.safetensors, at byte {header}; the rest is not used",
        "in a header": f"1.tar: no tar header at byte {header}; the rest is not used",
        "between samples": f"1.tar: ends at byte {header} without the mark of a tar's end; it may be cut short",
    }
    assert problems[0] == said.get(cut, "1.tar: no uncompressed tar that can be read: truncated header")
    assert load(tmp_path)[1] == problems


def edited(**changes):
    """Members of the samples a and b, where b's json or latent (`json=`, `latent=`) is other bytes, or None."""
    members = {**sample_members("a", latent()), **sample_members("b", latent())}
    for word, content in changes.items():
        members[{"json": "b.json", "latent": "b.latent.safetensors"}[word]] = content
    return {name: content for name, content in members.items() if content is not None}


@pytest.mark.parametrize(
    ("members", "said"),
    [
        (edited(json=None), "0.tar: b has no b.json"),
        (edited(latent=None), "0.tar: b has no b.latent.safetensors"),
        (edited(json=b"{"), "0.tar: the json of b at byte "),
        (edited(json=b"[" * 100_000), "0.tar: the json of b at byte "),
        (edited(json=b"[1]"), "its json is a list, not an object"),
        (edited(json=b'{"caption": "\\ud800"}'), "0.tar: the json of b at byte "),
        (edited(latent=b""), ": 0 bytes that are not a whole safetensors file"),
        (edited(latent=save({"latent": latent()})[:-1]), "bytes, but has"),
        (edited(latent=save({"weight": torch.zeros(2, 2)})), "'weight' must be [C, F, H, W]"),
        (edited(latent=save({"latent": latent(channels=5)})), "0.tar/b: has latent of 5 channels bfloat16; not used"),
        ([*edited(json=None).items(), ("a.json", b"{}")], "0.tar: a.json stands there twice, at byte "),
    ],
)
def test_an_incomplete_or_damaged_sample_is_named_and_the_rest_kept(tmp_path, members, said):
    save_shard(tmp_path / "0.tar", members)
    dataset, problems = load(tmp_path)
    assert names(dataset) == ["0.tar/a"]
    assert any(said in problem for problem in problems)
    assert batch_of(dataset, 0)["caption"] == ["caption of a"]


def test_damage_inside_a_shard_and_a_second_archive_are_named(tmp_path):
    first = shard_of(tmp_path / "0.tar", "a", "b")
    with tarfile.open(first) as tar:
        offset = tar.getmember("b.latent.safetensors").offset
    content = first.read_bytes()
    first.write_bytes(content[:offset] + b"\x07" * 512 + content[offset + 512 :])
    (tmp_path / "1.tar").write_bytes(content + content)
    (tmp_path / "2.tar").write_bytes(gzip.compress(content))
    (tmp_path / "3.tar").write_bytes(b"")
    save_shard(tmp_path / "4.tar", {"clip.mp4": b"1", "sub/._k.json": b"{}"})
    dataset, problems = load(tmp_path)
    assert names(dataset) == ["0.tar/a", "1.tar/a", "1.tar/b"]
    assert problems[0] == f"0.tar: no tar header at byte {offset}; the rest is not used"
    assert problems[1].startswith("1.tar: another tar follows at byte ")
    assert [problem[:39] for problem in problems[2:4]] == [f"{n}.tar: no uncompressed tar that can be " for n in "23"]
    assert problems[4:] == ["4.tar: no KEY.latent.safetensors in it"]


def test_members_of_a_plain_tar_command_are_found(tmp_path):
    # `tar -cf x.tar .` begins every name with ./ and has members for folders.
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        folder = tarfile.TarInfo("./sub")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, content in sample_members("./sub/a", latent(value=3)).items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    (tmp_path / "0.tar").write_bytes(buffer.getvalue())
    dataset, problems = load(tmp_path)
    assert problems == [] and names(dataset) == ["0.tar/sub/a"]
    assert batch_of(dataset, 0)["latent"].unique().tolist() == [3]


def test_samples_that_tar_packed_as_links_are_named(tmp_path):
    """As of files that are linked to each other: the second is in the tar as a name alone."""
    for name, content in sample_members("a", latent()).items():
        (tmp_path / name).write_bytes(content)
        os.link(tmp_path / name, tmp_path / name.replace("a", "b", 1))
        (tmp_path / name.replace("a", "c", 1)).symlink_to(name)
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for path in sorted(tmp_path.glob("[abc].*")):
            tar.add(path, path.name)
    dataset, problems = load(tmp_path)
    assert names(dataset) == ["0.tar/a"]
    assert problems[0] == (
        "0.tar: b.json is a link to a.json, not a file; not used. Pack it with `tar --dereference --hard-dereference`"
    )
    assert [problem.split(" is a link")[0] for problem in problems[1:]] == [
        "0.tar: b.latent.safetensors",
        "0.tar: c.json",
        "0.tar: c.latent.safetensors",
    ]


def test_shards_in_folders_of_a_system_are_named_and_not_used(tmp_path):
    for folder in (".", "sub", ".Trash-0", "#recycle"):
        shard_of(tmp_path / folder / "0.tar", "a")
    dataset, problems = load(tmp_path)
    assert names(dataset) == ["0.tar/a", "sub/0.tar/a"]
    said = "it is in a folder that is hidden or a system's own; not used"
    assert problems == [f"#recycle/0.tar: {said}", f".Trash-0/0.tar: {said}"]


def test_names_that_are_not_utf8_lose_no_sample_beside_them(tmp_path):
    members = sample_members("k", latent()) | sample_members("\udcff", latent(), told={})
    shard = save_shard(tmp_path / "0.tar", members)
    os.rename(save_shard(tmp_path / "1.tar", members), os.fsencode(tmp_path) + b"/\xff.tar")
    dataset, problems = load(tmp_path)
    assert names(dataset) == ["0.tar/k", r"0.tar/\xff"] and shard.is_file()
    assert problems == [r"'\udcff.tar': the name is not UTF-8"]


def the_index(folder):
    found = list(folder.glob("adaptiveload_index_*"))
    assert len(found) == 1, found
    return found[0]


def test_the_index_is_built_once_and_again_when_a_shard_changes(tmp_path):
    shard_of(tmp_path / "0.tar", "a")
    shard = shard_of(tmp_path / "1.tar", "a")
    load(tmp_path)
    index = the_index(tmp_path)
    written = index.stat().st_ino
    assert names(load(tmp_path)[0]) == ["0.tar/a", "1.tar/a"] and index.stat().st_ino == written
    stamp = shard.stat()
    shard_of(shard, "b")
    os.utime(shard, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    assert shard.stat().st_size == stamp.st_size
    assert names(load(tmp_path)[0]) == ["0.tar/a", "1.tar/b"]
    shard_of(shard, "b", "c", "d", "e", "f")
    os.utime(shard, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    assert len(load(tmp_path)[0]) == 6
    written = index.stat().st_ino
    assert len(load(shard)[0]) == 5 and len(load(tmp_path)[0]) == 6 and index.stat().st_ino == written


def test_a_shard_that_could_not_be_read_is_tried_again(tmp_path, monkeypatch):
    shard_of(tmp_path / "0.tar", "a")
    shard_of(tmp_path / "1.tar", "b")

    def refuse(path, *arguments, whole=open, **options):
        if str(path).endswith("1.tar"):
            raise OSError(5, "Input/output error")
        return whole(path, *arguments, **options)

    monkeypatch.setattr("builtins.open", refuse)
    dataset, problems = load(tmp_path)
    assert names(dataset) == ["0.tar/a"] and problems == ["1.tar: Input/output error"]
    monkeypatch.undo()
    dataset, problems = load(tmp_path)
    assert names(dataset) == ["0.tar/a", "1.tar/b"] and problems == []


@pytest.mark.parametrize("content", ["cut", "cut in rows", b"", b"no index", "foreign"])
def test_an_index_that_is_damaged_or_foreign_is_written_anew(tmp_path, content):
    shard_of(tmp_path / "0.tar", "a", "b")
    load(tmp_path)
    index = the_index(tmp_path)
    if content == "foreign":
        table = pyarrow.table({"x": [1]})
        with pyarrow.ipc.new_stream(index, table.schema) as writer:
            writer.write_table(table)
    else:
        parts = {"cut": index.stat().st_size // 8, "cut in rows": index.stat().st_size - 9}
        index.write_bytes(index.read_bytes()[: parts[content]] if content in parts else content)
    assert names(load(tmp_path)[0]) == ["0.tar/a", "0.tar/b"]


def test_an_index_can_be_kept_elsewhere_and_one_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    shard_of(tmp_path / "data" / "0.tar", "a")
    load(tmp_path / "data", index=tmp_path / "offsets")
    assert (tmp_path / "offsets").is_file() and len(list((tmp_path / "data").iterdir())) == 1
    with pytest.raises(UserError, match=r"cannot be kept in .*missing.offsets: No such file.*Give a place.*index="):
        load(tmp_path / "data", index=tmp_path / "missing" / "offsets")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"cannot be kept in \.: .*Give a place.*index="):
        load(tmp_path / "data", index=".")


def test_a_shard_that_changes_after_loading_is_named_when_read(tmp_path):
    shard = shard_of(tmp_path / "0.tar", "a", "b")
    dataset, _ = load(tmp_path)
    shard_of(shard, "aa")
    found = BatchReader(dataset, collate_prepared).__getitems__([1])
    assert found.message.startswith("0.tar/b cannot be read any more: ")
    shard.unlink()
    found = BatchReader(dataset, collate_prepared).__getitems__([0])
    assert found.message == "0.tar/a cannot be read any more: No such file or directory"


def test_the_fingerprint_sees_keys_and_shard_names(tmp_path):
    def fingerprint(folder, *shards):
        for shard, *keys in shards:
            shard_of(tmp_path / folder / shard, *keys)
        dataset, _ = load(tmp_path / folder)
        return dataset_fingerprint(dataset, read_shapes(dataset))

    first = fingerprint("1", ("0.tar", "a", "b"), ("1.tar", "a"))
    assert fingerprint("2", ("0.tar", "a", "b"), ("1.tar", "a")) == first
    assert fingerprint("3", ("0.tar", "a", "c"), ("1.tar", "a")) != first
    assert fingerprint("4", ("0.tar", "a"), ("1.tar", "b", "a")) != first


def test_no_shards_no_samples_and_an_unsaid_flag_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"Expected \*.tar shards, .* found none at"):
        load(tmp_path)
    with pytest.raises(UserError, match=r"found none at .*absent.tar"):
        load([tmp_path / "absent.tar"])
    save_shard(tmp_path / "0.tar", {"a.json": b"{}"})
    with pytest.raises(UserError, match=r"found none; 0.tar: a has no a.latent.safetensors"):
        load(tmp_path)
    with pytest.raises(UserError, match="latent_normalized must be True or False"):
        load_tar_shards(tmp_path)
