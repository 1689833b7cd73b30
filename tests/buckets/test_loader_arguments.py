"""What a loader, a sampler and a plan refuse before a sample is lost, repeated or trained in a wrong batch."""

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from support.bucketed import COST, SHAPES, CountedConfig, NumberedRows, collate_numbers, fixed_plan, mixed_index
from torch.utils.data import IterableDataset, default_collate

from adaptiveload_hf.buckets.cost import Additive, PowerLaw
from adaptiveload_hf.buckets.loader import BucketDataLoader
from adaptiveload_hf.buckets.plan import make_plan
from adaptiveload_hf.buckets.sampler import BucketBatchSampler
from adaptiveload_hf.buckets.schedule import schedule_epoch
from adaptiveload_hf.buckets.shapes import BucketIndex
from adaptiveload_hf.errors import UserError

COUNTS = (20, 10, 5)
INDEX = mixed_index(COUNTS)


def make(dataset=None, accelerator=None, **options):
    rows = NumberedRows(35) if dataset is None else dataset
    options = {"shapes": INDEX, "collate_fn": collate_numbers, **options}
    return BucketDataLoader(rows, CountedConfig(), accelerator=accelerator or Accelerator(cpu=True), **options)


@pytest.mark.parametrize(
    "index",
    [
        BucketIndex(INDEX.shapes[::-1], 2 - INDEX.bucket_of_sample),  # a plan would sort them, and 3x4x10 be 1x4x6
        BucketIndex((*SHAPES[:2], SHAPES[1]), INDEX.bucket_of_sample),
        BucketIndex(tuple(map(str, SHAPES[:3])), INDEX.bucket_of_sample),
        BucketIndex(SHAPES[:2], INDEX.bucket_of_sample),
        BucketIndex(SHAPES[:3], INDEX.bucket_of_sample - 1),
        BucketIndex(SHAPES[:3], INDEX.bucket_of_sample.astype(float)),
        BucketIndex(SHAPES[:3], INDEX.bucket_of_sample[:, None]),
    ],
    ids=["not sorted", "twice", "words", "too few", "negative", "no whole numbers", "columns"],
)
def test_shapes_in_which_a_sample_would_be_of_another_bucket_are_refused(index):
    with pytest.raises(UserError, match=r"distinct, sorted LatentShapes .* but found .* Call index_shapes"):
        make(shapes=index)


def test_shapes_without_samples_and_lists_of_buckets_are_an_index_too():
    index = BucketIndex(SHAPES[:5], INDEX.bucket_of_sample.tolist())
    samples = [batch["sample_index"] for batch in make(shapes=index)]
    assert sorted(torch.cat(samples).tolist()) == list(range(35))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_workers": "4"}, "num_workers is a whole number from 0 on, but found '4'"),
        ({"num_workers": 2, "prefetch_factor": 0}, "prefetch_factor is a whole number from 1 on, but found 0"),
        ({"persistent_workers": True}, "persistent_workers=True and prefetch_factor=None need workers"),
        ({"prefetch_factor": 2}, "persistent_workers=False and prefetch_factor=2 need workers"),
        ({"collate_fn": "mine"}, "collate_fn must be a function .*, but it is str 'mine'"),
        ({"repeats": np.full(35, 1e300)}, r"35 numbers of at least 0, .*, together below 2\^31"),
    ],
)
def test_options_that_torch_or_numpy_would_refuse_in_other_words_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        make(**options)


def test_a_streaming_dataset_of_known_length_is_refused():
    class Stream(IterableDataset):
        def __len__(self):
            return 35

        def __iter__(self):
            return iter(range(35))

    with pytest.raises(UserError, match=r"rows by index; of a streaming dataset .*, but it is Stream"):
        make(Stream())


def rows(**columns):
    shapes = [[4, shape.frames, shape.height, shape.width] for shape in np.array(SHAPES)[INDEX.bucket_of_sample]]
    return datasets.Dataset.from_dict({"latent_shape": shapes, "number": list(range(35)), **columns})


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_formats_that_cut_zero_bytes_off_stored_tensors_are_refused_without_a_collate_fn(kind):
    stored = rows(latent=[b"\1\0"] * 35).with_format(kind)
    assert len(stored[0]["latent"]) == 1  # the reason
    with pytest.raises(
        UserError, match=rf"has set_format\('{kind}'\), which cuts zeros off .* Give it as it was loaded"
    ):
        make(stored, shapes=None, collate_fn=None)
    assert make(stored, shapes=None, collate_fn=lambda found: {"n": [row["number"] for row in found]})


@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_that_drops_rows_loses_no_sample_in_silence(workers):
    dropping = rows().with_transform(lambda found: {"number": [n for n in found["number"] if n != 7]})
    with pytest.raises(UserError, match=r"gave \d+ rows for the \d+ samples \[.*7.*\], so some would be lost"):
        list(make(dropping, num_workers=workers))


def test_names_that_the_loader_adds_are_not_taken_from_the_data():
    with pytest.raises(
        UserError, match=r"adds loss_weight, micro_step, bucket to a batch, but .* gave bucket, loss_w"
    ):
        next(iter(make(collate_fn=lambda found: {"loss_weight": torch.ones(len(found)), "bucket": "mine"})))
    with pytest.raises(UserError, match="has a column sample_index, as the loader's own in its rows: rename it"):
        next(iter(make(rows(sample_index=list(range(35))), collate_fn=default_collate)))
    assert next(iter(make(collate_fn=default_collate)))["sample_index"].dtype == torch.int64


def test_skipping_the_first_batches_is_refused_with_what_to_do():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(
        UserError, match=r"after accelerator.load_state it goes on by itself\. Leave skip_first_batches"
    ):
        accelerator.skip_first_batches(make(accelerator=accelerator), 3)


@pytest.mark.parametrize("epoch", [None, 1.5, "1", -1])
def test_an_epoch_is_a_whole_number(epoch):
    with pytest.raises(UserError, match=f"whole numbers from 0 on, but found 0 and {epoch!r}"):
        make().set_epoch(epoch)


@pytest.mark.parametrize("rank", [2, -1])
def test_a_rank_that_the_schedule_does_not_have_gets_no_other_ranks_samples(rank):
    run = {"world_size": 2, "loss_normalization": "none"}
    sampler = BucketBatchSampler(INDEX.bucket_of_sample, fixed_plan(COUNTS, (4, 2, 1), 2, 1), COST, **run)
    words = rf"data ranks 0\.\.1 and micro-steps 0\.\.\d+, but found rank {rank} and micro-step 0"
    for ask in (lambda: list(sampler.for_rank(rank)), lambda: sampler.loss_weight(0, rank)):
        with pytest.raises(UserError, match=words):
            ask()
    with pytest.raises(UserError, match="found rank 0 and micro-step -1"):
        sampler.schedule.occurrences(-1, 0)


@pytest.mark.parametrize(
    "cost",
    [PowerLaw(0.0, 0.0, 1.0), PowerLaw(-1.0, 1e-3, 1.0), Additive(9.0, 0.0, -1e-3, 0.0), PowerLaw(np.nan, 1.0, 1.0)],
    ids=["no time", "less than none", "less for more", "no number"],
)
def test_a_cost_by_which_nothing_can_be_balanced_is_refused(cost):
    run, words = {"world_size": 1}, "must make a step take time, and more samples no less, but by"
    with pytest.raises(UserError, match=words):
        make_plan(dict(zip(SHAPES, COUNTS)), cost, m_mem_tokens=100, **run)
    with pytest.raises(UserError, match=words):
        schedule_epoch(INDEX.bucket_of_sample, fixed_plan(COUNTS, (4, 2, 1), 1, 1), cost, **run)
