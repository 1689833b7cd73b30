"""How is a Wan pipeline folder made without a download? Real classes, tiny sizes, random weights.

python recipes/tiny_wan.py --output_dir tiny-wan
"""

import argparse
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

TEXT_WIDTH = 32


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


def tiny_wan(seed: int = 0) -> WanPipeline:
    """A WanPipeline of real components with random weights; its pictures are noise.

    Args:
        seed: of the weights; the caller's random state is left as it was.

    Returns:
        The pipeline, float32, on the CPU. Latents have 16 channels, as Wan 2.1's.
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
        vae = AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
        transformer = WanTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=32,
            in_channels=16,
            out_channels=16,
            text_dim=TEXT_WIDTH,
            freq_dim=64,
            ffn_dim=256,
            num_layers=4,
            rope_max_seq_len=64,
        )
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder.eval(),
        vae=vae.eval(),
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def save_tiny_wan(folder, seed: int = 0) -> Path:
    """Saves `tiny_wan(seed)` as a pipeline folder that `WanPipeline.from_pretrained` loads.

    Args:
        folder: where to; made if it is not there.
        seed: of the weights.

    Returns:
        The folder.
    """
    tiny_wan(seed).save_pretrained(folder)
    return Path(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the new pipeline")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    args = parser.parse_args()
    print(save_tiny_wan(args.output_dir, args.seed))


if __name__ == "__main__":
    main()
