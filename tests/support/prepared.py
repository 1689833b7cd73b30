"""Small prepared datasets, as recipes/prepare_dataset.py writes them, from random latents."""

from pathlib import Path

import datasets
import torch


def save_prepared(
    folder,
    counts: dict[str, int],
    *,
    channels=16,
    text_shape=(8, 32),
    seed=0,
    normalized=True,
    nan_in=None,
    pooled=None,
) -> Path:
    """Saves `counts` samples a shape (`{"5x8x12": 7}`); sample number `nan_in` holds a NaN.

    pooled: width of the pooled caption embeddings that SD3 takes.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for shape, count in counts.items():
        size = [channels, *map(int, shape.split("x"))]
        for _ in range(count):
            latent = torch.randn(size, generator=generator).bfloat16()
            if len(rows) == nan_in:
                latent[0, 0, 0, 0] = float("nan")
            text = torch.randn(text_shape, generator=generator).bfloat16()
            rows.append(
                {
                    "latent": raw_bytes(latent),
                    "latent_shape": size,
                    "latent_dtype": "bfloat16",
                    "latent_normalized": normalized,
                    "prompt_embeds": raw_bytes(text),
                    "prompt_embeds_shape": list(text_shape),
                    "prompt_embeds_dtype": "bfloat16",
                    "caption": f"sample {len(rows)}",
                    "file": f"{len(rows)}.mp4",
                }
            )
            if pooled is not None:
                embeds = torch.randn(pooled, generator=generator).bfloat16()
                rows[-1] |= {
                    "pooled_prompt_embeds": raw_bytes(embeds),
                    "pooled_prompt_embeds_shape": [pooled],
                    "pooled_prompt_embeds_dtype": "bfloat16",
                }
    text, sizes = datasets.Value("string"), datasets.List(datasets.Value("int32"))
    features = datasets.Features(
        {
            "latent": datasets.Value("large_binary"),
            "latent_shape": sizes,
            "latent_dtype": text,
            "latent_normalized": datasets.Value("bool"),
            "prompt_embeds": datasets.Value("large_binary"),
            "prompt_embeds_shape": sizes,
            "prompt_embeds_dtype": text,
            "caption": text,
            "file": text,
        }
    )
    if pooled is not None:
        name = "pooled_prompt_embeds"
        features |= {name: datasets.Value("large_binary"), f"{name}_shape": sizes, f"{name}_dtype": text}
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(Path(folder) / "dataset"))
    return Path(folder)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def save_config(folder, shapes, *, floor=0.02, memory=False) -> Path:
    """Saves a bucket config whose steps take max(floor, 0.001 s a token) and, with memory, 1 GiB + 0.01 a token."""
    from adaptiveload_hf import BucketConfig, LatentShape, Measurement, TokenGeometry

    geometry = TokenGeometry()
    sizes = [(shape, geometry.tokens(LatentShape.parse(shape)), batch) for shape in shapes for batch in (1, 2, 3)]
    measurements = [
        Measurement(shape, tokens, batch, max(floor, 1e-3 * batch * tokens), memory * (1 + 0.01 * batch * tokens))
        for shape, tokens, batch in sizes
    ]
    environment = {"world_size": 2, "gradient_accumulation_steps": 2}
    config = BucketConfig.from_measurements(measurements, model={}, environment=environment, geometry=geometry)
    config.save_pretrained(folder)
    return Path(folder)
