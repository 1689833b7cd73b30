"""Are automatic buckets legal, few, and do they keep what they promise?"""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media import choose_bucket
from resolution_buckets import (
    KEPT_AREA,
    KEPT_FRAMES,
    Bucket,
    Footage,
    Grid,
    automatic_buckets,
    choose_lengths,
    choose_sizes,
    fewest_groups,
    legal_sizes,
)

from adaptiveload_hf import UserError

WAN, SD3 = Grid(4, 16), Grid(0, 16)
LARGEST = Bucket(81, 480, 832)


def footage(frames, height, width):
    return Footage(tuple(range(frames)), height, width, frames > 1)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.builds(footage, st.integers(1, 200), st.integers(90, 2200), st.integers(90, 2200)), min_size=1, max_size=30
    ),
    st.sampled_from([WAN, Grid(4, 32), SD3]),
)
def test_buckets_are_legal_no_larger_than_asked_and_fit_every_file_that_is_long_enough(files, grid):
    buckets = automatic_buckets(files, grid, LARGEST)
    for bucket in buckets:
        assert grid.nearest(bucket) == bucket
        assert bucket.frames <= 81 and bucket.height * bucket.width <= 480 * 832
    for seen in files:
        if not seen.moving or (grid is not SD3 and len(seen.source_frames) >= 5):
            choose_bucket(seen, buckets, 16)
        else:
            with pytest.raises(UserError):
                choose_bucket(seen, buckets, 16)


@settings(deadline=None)
@given(st.dictionaries(st.integers(1, 20).map(lambda n: 4 * n + 1), st.integers(1, 50), min_size=1, max_size=8))
def test_lengths_are_the_fewest_that_keep_nine_tenths_of_the_frames(counts):
    def kept(lengths):
        return sum(count * max((n for n in lengths if n <= frames), default=0) for frames, count in counts.items())

    chosen, total = choose_lengths(Counter(counts)), sum(frames * count for frames, count in counts.items())
    assert kept(chosen) >= KEPT_FRAMES * total * (1 - 1e-9) and min(chosen) == min(counts)
    for fewer in itertools.combinations(counts, len(chosen) - 1):
        assert min(counts) not in fewer or kept(fewer) < KEPT_FRAMES * total * (1 + 1e-9)


def test_one_aspect_ratio_is_one_size_and_every_picture_keeps_its_area():
    assert automatic_buckets([footage(81, 1080, 1920)] * 9, WAN, LARGEST) == [Bucket(81, 480, 832)]
    pictures = Counter({(1080, 1920): 50, (1920, 1080): 30, (1000, 1000): 20})
    sizes = choose_sizes(pictures, WAN, LARGEST)
    assert len(sizes) == 3
    lost = 0
    for (height, width), count in pictures.items():
        ratios = [(w / h) / (width / height) for h, w in sizes]
        lost += count * min(1 - min(ratio, 1 / ratio) for ratio in ratios)
    assert lost <= (1 - KEPT_AREA) * 100


@given(st.integers(1, 6), st.integers(0, 10**6))
def test_groups_are_the_fewest_within_the_loss_that_is_allowed(n, seed):
    random = np.random.default_rng(seed)
    loss = random.uniform(0, 1, (n, n))
    allowed = np.diag(loss).sum() + random.uniform(0, 1)

    def total(cuts):
        edges = [0, *cuts, n]
        return sum(loss[first, last - 1] for first, last in itertools.pairwise(edges))

    groups = fewest_groups(loss, allowed)
    assert [first for first, _ in groups[1:]] == [last + 1 for _, last in groups[:-1]]
    assert (groups[0][0], groups[-1][1]) == (0, n - 1)
    found = sum(loss[group] for group in groups)
    same = [total(cuts) for cuts in itertools.combinations(range(1, n), len(groups) - 1)]
    fewer = [total(cuts) for k in range(len(groups) - 1) for cuts in itertools.combinations(range(1, n), k)]
    assert found <= allowed * (1 + 1e-9) and found == pytest.approx(min(same))
    assert all(value > allowed for value in fewer)


def test_an_area_below_one_step_is_refused():
    with pytest.raises(UserError, match="--height 8 and --width 8 leave no size: this model needs multiples of 16"):
        legal_sizes(WAN, Bucket(1, 8, 8))
