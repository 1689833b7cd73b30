"""Shapes are read right, whatever was done to the dataset, and wrong ones are named."""

import tracemalloc

import datasets
import numpy as np
import pyarrow
import pytest
from support.prepared import save_prepared

from adaptiveload_hf.buckets.shapes import (
    BucketIndex,
    LatentShape,
    TokenGeometry,
    dataset_fingerprint,
    index_shapes,
    read_shapes,
    shape_counts,
)
from adaptiveload_hf.buckets.sources import load_prepared
from adaptiveload_hf.errors import UserError


def table(sizes):
    return datasets.Dataset.from_dict({"latent_shape": sizes, "caption": ["a"] * len(sizes)})


def names(dataset):
    index = read_shapes(dataset)
    return [str(index.shapes[bucket]) for bucket in index.bucket_of_sample]


def test_a_shape_reads_what_it_writes():
    assert str(LatentShape.parse("21x60x104")) == "21x60x104"
    assert LatentShape.parse("21x60x104").pixels() == "81x480x832"
    assert LatentShape.parse("1x32x32").pixels() == "1x256x256"


def test_a_shape_with_two_numbers_is_refused_with_a_hint():
    with pytest.raises(UserError, match="Write a still as '1x60x104'"):
        LatentShape.parse("60x104")


@pytest.mark.parametrize(
    "text", ["", "21x60", "0x8x8", "-1x8x8", "1x2x3x4", "axbxc", "1x 8x8", "01x8x8", f"1048576x8x{'9' * 5000}"]
)
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(UserError):
        LatentShape.parse(text)


def test_tokens_follow_the_patch_and_the_joined_text():
    assert TokenGeometry().tokens(LatentShape(21, 60, 104)) == 32760
    assert TokenGeometry((1, 2, 2), text_tokens=333).tokens(LatentShape(1, 128, 128)) == 4096 + 333


@pytest.mark.parametrize(
    "geometry", [((0, 1, 1),), ((1, -2, 2),), ((1, 2),), (2,), ((1.0, 2, 2),), ((1, 2, 2), -1), ((1, 2, 2), 10**30)]
)
def test_what_is_no_geometry_is_refused(geometry):
    with pytest.raises(UserError, match=r"three whole numbers from 1 to 1024 .* but found"):
        TokenGeometry(*geometry)


def test_a_shape_that_the_patch_does_not_divide_is_refused():
    with pytest.raises(UserError, match="3x5x8 must be a multiple of the transformer's patch 1x2x2"):
        TokenGeometry().tokens(LatentShape(3, 5, 8))


def test_shapes_are_read_sorted_by_size():
    index = read_shapes(table([[16, 5, 8, 8], [16, 1, 8, 12], [16, 5, 8, 8], [16, 1, 8, 8]]))
    assert index.shapes == (LatentShape(1, 8, 8), LatentShape(1, 8, 12), LatentShape(5, 8, 8))
    assert index.bucket_of_sample.tolist() == [2, 1, 2, 0]
    assert list(shape_counts(index).values()) == [1, 1, 2]
    assert list(shape_counts(index, np.array([0.5, 2.0, 1.2, 0.0])).values()) == [0, 2, 2]


def test_shuffle_select_and_filter_are_honoured():
    sizes = [[16, f, 8, 8] for f in (1, 5, 9, 13, 17, 21)]
    dataset = table(sizes).shuffle(seed=3).select([0, 2, 3, 5]).filter(lambda row: row["latent_shape"][1] != 5)
    assert names(dataset) == ["x".join(map(str, row["latent_shape"][1:])) for row in dataset]


def test_no_other_column_is_decoded(tmp_path):
    broken = tmp_path / "no_image.png"
    broken.write_bytes(b"not an image")
    dataset = datasets.Dataset.from_dict({"latent_shape": [[16, 1, 8, 8]], "picture": [str(broken)]})
    dataset = dataset.cast_column("picture", datasets.Image())
    assert names(dataset) == ["1x8x8"]


def test_a_dataset_without_shapes_is_refused():
    with pytest.raises(UserError, match=r"column 'latent_shape'.*load_prepared\(FOLDER\)"):
        read_shapes(datasets.Dataset.from_dict({"caption": ["a"]}))
    with pytest.raises(UserError, match="found list"):
        read_shapes([1, 2])


def test_a_row_that_is_no_latent_shape_is_named():
    with pytest.raises(UserError, match=r"sample 1 has \[16, 8, 8\]"):
        read_shapes(table([[16, 1, 8, 8], [16, 8, 8]]))
    with pytest.raises(UserError, match="sample 2 has None"):
        read_shapes(table([[16, 1, 8, 8], [16, 1, 8, 8], None]))
    with pytest.raises(UserError, match=r"Sample 1 has the latent shape \(0, 8, 8\)"):
        read_shapes(table([[16, 1, 8, 8], [16, 0, 8, 8]]))


@pytest.mark.parametrize("column", [["16x1x8x8"], [5], [[16, 1, 8, 8.5]], [[[16], [1], [8], [8]]], [None]])
def test_a_column_of_other_things_than_whole_numbers_is_refused(column):
    with pytest.raises(UserError, match="four whole numbers, but the column holds"):
        read_shapes(datasets.Dataset.from_dict({"latent_shape": column}))


def test_a_size_that_is_missing_is_named():
    with pytest.raises(UserError, match=r"sample 1 has \[16, 1, None, 8\]"):
        read_shapes(table([[16, 1, 8, 8], [16, 1, None, 8]]))


@pytest.mark.parametrize("sizes", [[[16, 1, 8, 8]], [1, 8, 8], [[1, 8, 8.5]], [["1", "8", "8"]]])
def test_sizes_that_are_not_three_whole_numbers_a_sample_are_refused(sizes):
    with pytest.raises(UserError, match="frames, height, width, without channels"):
        index_shapes(np.array(sizes))


def test_a_size_over_the_limit_is_named():
    with pytest.raises(UserError, match=r"Sample 1 has the latent shape \(1, 1048576, 8\).*below 2\^20"):
        index_shapes(np.array([[1, 8, 8], [1, 1 << 20, 8]]))


def test_an_empty_dataset_is_refused():
    with pytest.raises(UserError, match="empty"):
        read_shapes(table([[16, 1, 8, 8]]).select([]))


def test_a_million_sizes_group_like_numpy_rows():
    sizes = np.random.default_rng(0).integers(1, 9, ((1 << 20) + 9, 3))
    index = index_shapes(sizes)
    back = np.array([[s.frames, s.height, s.width] for s in index.shapes])[index.bucket_of_sample]
    assert (back == sizes).all()


def test_a_prepared_dataset_loads_from_either_folder(tmp_path):
    save_prepared(tmp_path, {"1x8x8": 2, "5x8x8": 1}, channels=4)
    assert names(load_prepared(tmp_path)) == names(load_prepared(tmp_path / "dataset")) == ["1x8x8", "1x8x8", "5x8x8"]


def test_an_absent_or_empty_prepared_dataset_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"Expected a prepared dataset.*Give the --output_dir of recipes/prepare"):
        load_prepared(tmp_path)
    table([[16, 1, 8, 8]]).select([]).save_to_disk(str(tmp_path / "dataset"))
    with pytest.raises(UserError, match="is empty"):
        load_prepared(tmp_path)


@pytest.mark.parametrize("file", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
def test_a_prepared_dataset_that_is_damaged_is_refused(tmp_path, file):
    save_prepared(tmp_path, {"1x8x8": 2}, channels=4)
    damaged = tmp_path / "dataset" / file
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    with pytest.raises(UserError, match="is not whole"):
        load_prepared(tmp_path)


def test_the_fingerprint_names_the_content_not_the_way_there(tmp_path):
    dataset = load_prepared(save_prepared(tmp_path, {"1x8x8": 3, "5x8x8": 2}, channels=4))
    same = load_prepared(save_prepared(tmp_path / "again", {"1x8x8": 3, "5x8x8": 2}, channels=4))

    def of(data, repeats=None):
        return dataset_fingerprint(data, read_shapes(data), repeats)

    assert of(dataset) == of(same)
    assert of(dataset) != of(dataset.shuffle(seed=0))
    assert of(dataset) != of(dataset.select([0, 0, 1, 3, 4]))
    assert of(dataset) != of(dataset, np.ones(5))


def test_the_fingerprint_of_many_files_holds_few_names_at_once():
    samples = 300_000
    files = pyarrow.array([f"folder/{number:09d}.mp4" for number in range(samples)])
    dataset = datasets.Dataset(pyarrow.table({"file": files}))
    index = BucketIndex((LatentShape(1, 4, 4),), np.zeros(samples, dtype=np.int64))
    tracemalloc.start()
    dataset_fingerprint(dataset, index)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < samples * 70 / 2  # bytes of half of the names


@pytest.mark.slow
def test_a_shuffled_dataset_may_have_more_than_two_gib_of_file_names():
    """In one piece of memory, as Arrow gathers them."""
    files = pyarrow.array([f"{number:01000d}" for number in range(1000)])
    many = pyarrow.table({"file": pyarrow.chunked_array([files] * 2200)})
    samples = datasets.Dataset(many, fingerprint="many").select([2_199_999, 1])
    few = datasets.Dataset(pyarrow.table({"file": [f"{number:01000d}" for number in (999, 1)]}))
    index = index_shapes(np.ones((2, 3), dtype=np.int64))
    assert dataset_fingerprint(samples, index) == dataset_fingerprint(few, index)
