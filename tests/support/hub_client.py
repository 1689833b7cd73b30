"""What does a bucket config's user meet on the Hub? Run as a program against HF_ENDPOINT; prints a JSON object."""

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.hub_server import READ_TOKEN, WRITE_TOKEN
from support.measured import fit_config, make_config, measure

from adaptiveload_hf import BucketConfig, UserError

work = Path(sys.argv[1])
said = {}


def attempt(name, action):
    try:
        said[name] = action()
    except UserError as error:
        said[name] = f"UserError: {error}"


def same(one, other):
    return one.to_json_string() == other.to_json_string() and one.measurements == other.measurements


def load(repo_id, cache="cache", **options):
    return BucketConfig.from_pretrained(repo_id, cache_dir=work / cache, **options)


config = make_config()
slower = fit_config([replace(m, seconds=2 * m.seconds) for m in measure()])

attempt("push", lambda: config.push_to_hub("someone/wan", token=WRITE_TOKEN))
attempt("load", lambda: same(load("someone/wan"), config))
attempt("push again", lambda: config.push_to_hub("wan", token=WRITE_TOKEN))
attempt("push another", lambda: slower.push_to_hub("someone/wan", token=WRITE_TOKEN))
attempt("load newest", lambda: same(load("someone/wan"), slower))
first = said["push"].rsplit("/", 1)[1]
attempt("load first", lambda: same(load("someone/wan", revision=first), config))
attempt("load cached", lambda: same(load("someone/wan", local_files_only=True), slower))
attempt("no such revision", lambda: load("someone/wan", revision="v9"))
attempt("no such repository", lambda: load("someone/wam"))
attempt("not in the cache", lambda: load("someone/wan", cache="empty", local_files_only=True))

attempt("push without token", lambda: config.push_to_hub("someone/other"))
attempt("push with read token", lambda: config.push_to_hub("someone/other", token=READ_TOKEN))
attempt("push to no id", lambda: config.push_to_hub("some one/x/y", token=WRITE_TOKEN))
attempt("push private", lambda: config.push_to_hub("someone/secret", token=WRITE_TOKEN, private=True))
attempt("load private without token", lambda: load("someone/secret", cache="empty"))
attempt("load private", lambda: same(load("someone/secret", token=READ_TOKEN), config))
attempt("push private to public", lambda: config.push_to_hub("someone/wan", token=WRITE_TOKEN, private=True))

wan = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 16, "ffn_dim": 32}
wan |= {"text_dim": 4096, "freq_dim": 256, "patch_size": [1, 2, 2], "_class_name": "WanTransformer3DModel"}
counted = BucketConfig.from_flops(wan, batch_sizes={"1x60x104": 8})
attempt("push counted", lambda: counted.push_to_hub("someone/counted", token=WRITE_TOKEN))
attempt("load counted", lambda: same(load("someone/counted"), counted))

folder = work / "saved"
folder.mkdir()
(folder / "checkpoint.safetensors").write_bytes(b"weights")
options = {"push_to_hub": True, "repo_id": "someone/saved", "token": WRITE_TOKEN}
attempt("push fails", lambda: config.save_pretrained(folder, **options))  # the test's server answers 500 to this one
attempt("kept after failure", lambda: same(BucketConfig.from_pretrained(folder), config))
attempt("save and push", lambda: config.save_pretrained(folder, **options))
print(json.dumps(said))
