"""How is an SD3 pipeline folder made without a download? Real classes, tiny sizes, random weights.

python recipes/tiny_sd3.py --output_dir tiny-sd3
"""

import argparse
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from tiny_wan import byte_tokenizer
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

CLIP_WIDTHS, T5_WIDTH = (16, 24), 64


def tiny_clip(width: int, vocab_size: int) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        projection_dim=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    return CLIPTextModelWithProjection(config)


def tiny_sd3(seed: int = 0) -> StableDiffusion3Pipeline:
    """A StableDiffusion3Pipeline of real components with random weights; its pictures are noise.

    Args:
        seed: of the weights; the caller's random state is left as it was.

    Returns:
        The pipeline, float32, on the CPU. Latents have 16 channels; captions 77 + max_sequence_length rows.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizers = [byte_tokenizer() for _ in range(3)]
        for tokenizer in tokenizers[:2]:
            tokenizer.model_max_length = 77
        vocab_size = len(tokenizers[0])
        t5 = T5EncoderModel(
            T5Config(vocab_size=vocab_size, d_model=T5_WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
        )
        vae = AutoencoderKL(
            block_out_channels=(8, 8, 8, 8),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=1,
            latent_channels=16,
            norm_num_groups=4,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.0609,
            scaling_factor=1.5305,
        )
        transformer = SD3Transformer2DModel(
            sample_size=32,
            patch_size=2,
            in_channels=16,
            out_channels=16,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=T5_WIDTH,
            caption_projection_dim=32,
            pooled_projection_dim=sum(CLIP_WIDTHS),
            pos_embed_max_size=96,
        )
        text_encoders = [tiny_clip(width, vocab_size) for width in CLIP_WIDTHS]
    return StableDiffusion3Pipeline(
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae.eval(),
        text_encoder=text_encoders[0].eval(),
        tokenizer=tokenizers[0],
        text_encoder_2=text_encoders[1].eval(),
        tokenizer_2=tokenizers[1],
        text_encoder_3=t5.eval(),
        tokenizer_3=tokenizers[2],
    )


def save_tiny_sd3(folder, seed: int = 0) -> Path:
    """Saves `tiny_sd3(seed)` as a pipeline folder that `StableDiffusion3Pipeline.from_pretrained` loads.

    Args:
        folder: where to; made if it is not there.
        seed: of the weights.

    Returns:
        The folder.
    """
    tiny_sd3(seed).save_pretrained(folder)
    return Path(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the new pipeline")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    args = parser.parse_args()
    print(save_tiny_sd3(args.output_dir, args.seed))


if __name__ == "__main__":
    main()
