"""The metrics.jsonl of a training run whose micro-batches follow a known law."""

import json

import numpy as np

from adaptiveload_hf.buckets.shapes import LatentShape, TokenGeometry

BATCH_SIZES = {"1x60x104": (1, 40), "5x60x104": (1, 10), "9x60x104": (1, 5), "13x60x104": (1, 4), "21x60x104": (1, 2)}


def tokens_of(shape):
    return TokenGeometry().tokens(LatentShape.parse(shape))


def write_log(path, law, *, steps, ranks=2, noise=0.02, batch_sizes=BATCH_SIZES, waited=0.001, tokens=tokens_of):
    """Writes optimizer steps of two micro-steps. The first two take five times as long, each 37th twice as long.

    tokens: of a shape; None: no line says them.
    """
    random = np.random.default_rng(0)
    lines = []
    for step in range(1, steps + 1):
        names = random.choice(list(batch_sizes), (2, ranks)).tolist()
        micro_batches = [
            [{"shape": s, "batch_size": int(random.integers(*batch_sizes[s], endpoint=True))} for s in row]
            for row in names
        ]
        seconds = sum(
            max(float(law.seconds(m["batch_size"], tokens_of(m["shape"]))) for m in row) for row in micro_batches
        )
        seconds *= (1 + noise * random.standard_normal()) * (5 if step <= 2 else 2 if step % 37 == 0 else 1)
        wait = waited * seconds
        if tokens is not None:
            micro_batches = [[{**m, "tokens": tokens(m["shape"])} for m in row] for row in micro_batches]
        fields = {"step": step, "seconds": seconds + wait, "data_wait_seconds": wait, "micro_batches": micro_batches}
        lines.append(json.dumps(fields))
    path.write_text("\n".join(lines) + "\n")
    return path
