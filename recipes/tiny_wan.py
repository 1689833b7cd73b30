"""How is a Wan pipeline folder made without a download? Real classes, tiny sizes, random weights.

python recipes/tiny_wan.py --output_dir tiny-wan
"""

import argparse
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

TEXT_WIDTH, IMAGE_WIDTH = 32, 16
KINDS = ("t2v", "i2v", "ti2v")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte and `</s>` at the end, so any text can be encoded without a vocabulary file."""
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def tiny_wan(seed: int = 0, kind: str = "t2v") -> WanPipeline | WanImageToVideoPipeline:
    """A Wan pipeline of real components with random weights; its pictures are noise.

    Args:
        seed: of the weights; the caller's random state is left as it was.
        kind: one of KINDS: text to video; image to video as Wan 2.1's, with an image encoder; Wan 2.2's TI2V, whose
            VAE makes one of 16 x 16 pixels.

    Returns:
        The pipeline, float32, on the CPU. Latents have 16 channels, TI2V's 48.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = byte_tokenizer()
        text_encoder = UMT5EncoderModel(
            UMT5Config(
                vocab_size=len(tokenizer),
                d_model=TEXT_WIDTH,
                d_kv=8,
                d_ff=64,
                num_layers=2,
                num_heads=4,
                feed_forward_proj="gated-gelu",
                is_encoder_decoder=False,
                use_cache=False,
                pad_token_id=0,
                eos_token_id=1,
            )
        )
        channels = 48 if kind == "ti2v" else 16
        compression = {"patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
        more = compression | {"is_residual": True, "decoder_base_dim": 4} if kind == "ti2v" else {}
        statistics = {"latents_mean": [0.1] * channels, "latents_std": [2.0] * channels} if kind == "ti2v" else {}
        vae = AutoencoderKLWan(
            base_dim=4, z_dim=channels, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **more, **statistics
        )
        image = {"image_dim": IMAGE_WIDTH, "added_kv_proj_dim": 128} if kind == "i2v" else {}
        transformer = WanTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=32,
            in_channels=2 * channels + 4 if kind == "i2v" else channels,
            out_channels=channels,
            text_dim=TEXT_WIDTH,
            freq_dim=64,
            ffn_dim=256,
            num_layers=4,
            rope_max_seq_len=64,
            **image,
        )
        parts = {
            "tokenizer": tokenizer,
            "text_encoder": text_encoder.eval(),
            "vae": vae.eval(),
            "transformer": transformer.eval(),
            "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
        }
        if kind == "i2v":
            return WanImageToVideoPipeline(**parts, **tiny_image_encoder())
    return WanPipeline(**parts, expand_timesteps=kind == "ti2v")


def tiny_image_encoder() -> dict:
    from transformers import CLIPImageProcessor  # here: it warns where torchvision is not installed

    size = {"height": 32, "width": 32}
    config = CLIPVisionConfig(
        hidden_size=IMAGE_WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=16,
    )
    processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size)
    return {"image_encoder": CLIPVisionModel(config).eval(), "image_processor": processor}


def save_tiny_wan(folder, seed: int = 0, kind: str = "t2v") -> Path:
    """Saves `tiny_wan(seed, kind)` as a pipeline folder that `DiffusionPipeline.from_pretrained` loads.

    Args:
        folder: where to; made if it is not there.
        seed: of the weights.
        kind: one of KINDS.

    Returns:
        The folder.
    """
    tiny_wan(seed, kind).save_pretrained(folder)
    return Path(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the new pipeline")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    parser.add_argument("--kind", choices=KINDS, default="t2v", help="(default: %(default)s)")
    args = parser.parse_args()
    print(save_tiny_wan(args.output_dir, args.seed, args.kind))


if __name__ == "__main__":
    main()
