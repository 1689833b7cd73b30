"""Does no nonsense in a hand-edited bucket_config.json get past the check, or break what is made from it?"""

import json
import re

import pytest
from support.measured import make_config

from adaptiveload_hf import BucketConfig, LatentShape, UserError

COUNTS = {LatentShape(1, 60, 104): 300, LatentShape(5, 60, 104): 80, LatentShape(21, 60, 104): 40}
RANKS = {"world_size": 2, "gradient_accumulation_steps": 2}
MISSING, INFINITY = "missing", "1e999"  # the second as JSON's number, which Python reads as infinity
NONSENSE = [-1, 0, "x", None, [], {}, [1], True, 10**400, 1e300, MISSING, INFINITY]
MAY_BE_ANYTHING = (
    "versions",
    "class",
    "config_hash",
    "base_model",
    "findings",
)  # shown or compared, not computed with


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder of a config with every part filled, its JSON)."""
    folder = tmp_path_factory.mktemp("config")
    config = make_config()
    config.example_plan = config.plan(COUNTS, **RANKS)
    config.save_pretrained(folder)
    return folder, (folder / "bucket_config.json").read_text()


def leaves(fields, path=()):
    for key, value in fields.items() if isinstance(fields, dict) else enumerate(fields):
        if not str(key).startswith("_") and key not in MAY_BE_ANYTHING:
            yield (*path, key)
            if isinstance(value, dict | list):
                yield from leaves(value, (*path, key))


def changed(text, path, value):
    fields = json.loads(text)
    target = fields
    for key in path[:-1]:
        target = target[key]
    if value == MISSING and isinstance(target, dict):
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return json.dumps(fields).replace(f'"{INFINITY}"', INFINITY)


def test_every_field_with_nonsense_in_it_is_named_or_harmless(saved):
    folder, text = saved
    refused = 0
    for path in leaves(json.loads(text)):
        for value in NONSENSE:
            if path[:2] == ("example_plan", "buckets") and path[2:3] not in ((), (0,)):
                continue  # the first bucket stands for all
            (folder / "bucket_config.json").write_text(changed(text, path, value))
            try:
                loaded = BucketConfig.from_pretrained(folder)
            except UserError as error:
                refused += 1
                named = set(re.findall(r"\w+", str(error)))
                assert {str(key) for key in path[-2:]} & named, (path, value, str(error))
            else:
                loaded.plan(COUNTS, **RANKS, target_seconds=50.0)
                loaded.to_json_string()
    assert refused > 400
