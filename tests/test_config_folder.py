"""Do the files of a saved bucket config survive a full disk, a foreign README and a wrong path?"""

import pytest
from support.full_disk import files_of_at_most
from support.measured import make_config

from adaptiveload_hf import BucketConfig, UserError
from adaptiveload_hf.buckets.cost import MemoryModel


@pytest.fixture
def folder(tmp_path):
    make_config().save_pretrained(tmp_path / "config")
    return tmp_path / "config"


def test_a_full_disk_leaves_the_saved_config_as_it_was(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for most in (1, len(before["measurements.jsonl"]) - 1, len(before["README.md"]) - 1):
        with files_of_at_most(most), pytest.raises(OSError, match="File too large"):
            make_config().save_pretrained(folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_readme_of_someone_else_stays_and_an_own_card_is_written_anew(folder, tmp_path):
    (tmp_path / "README.md").write_text("My project")
    with pytest.warns(UserWarning, match=r"README\.md is not a bucket config's card, so it stays"):
        make_config().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "My project"
    assert BucketConfig.from_pretrained(tmp_path).measurements == make_config().measurements
    card = (folder / "README.md").read_text()
    (folder / "README.md").write_text(card + "edited")
    make_config().save_pretrained(folder)
    assert (folder / "README.md").read_text() == card


def test_the_file_of_a_config_is_pointed_to_its_folder(folder):
    with pytest.raises(UserError, match=f"is a file, but a bucket config is a folder. Give {folder}."):
        BucketConfig.from_pretrained(folder / "bucket_config.json")


def test_a_config_with_a_rising_floor_of_memory_is_saved_loaded_and_described(tmp_path):
    config = make_config()
    config.register_to_config(memory_model={"base_gib": 16.2, "gib_per_token": 1.8e-4, "floor_gib": 21.3,
                                            "known_tokens": None, "gib_per_sample": 0.02,
                                            "floor_gib_per_token": 1.1e-4})  # fmt: skip
    config.memory_model = MemoryModel(**config.config["memory_model"])
    config.save_pretrained(tmp_path)
    assert BucketConfig.from_pretrained(tmp_path).memory_model == config.memory_model
    assert (
        "Memory: 16.2 GiB + 0.00018 GiB for each token of B*S + 0.02 GiB for each sample, "
        "at least 21.3 GiB + 0.00011 GiB for each token."
    ) in (tmp_path / "README.md").read_text()
