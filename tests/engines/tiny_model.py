"""Makes a model that is small enough for any machine: a Llama with random weights and a tokenizer of its own.

Run it in an engine's virtual environment: `python tiny_model.py DIRECTORY [--window TOKENS | --wide]`. It
fetches nothing. The same seed gives the same weights, so that two runs can be compared. With a window, every
second layer looks back only that many tokens, and the engine keeps two groups of KV cache. A wide model has 512
KiB of KV cache for each token.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

WORDS = 512
LONGEST = 2048
SEED = 20


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each word: `w0` to `w511`."""
    words = {f"w{number}": number for number in range(WORDS)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", bos_token="w1", eos_token="w2")


def llama(layers: int = 2, heads: int = 4, kv_heads: int = 2, width: int = 32) -> LlamaForCausalLM:
    """Layers of full attention. `width` is the number of elements of a head."""
    shape = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width,
        max_position_embeddings=LONGEST,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(shape)


def windowed(window: int) -> Gemma3ForCausalLM:
    """Two layers with a sliding window, and two layers of full attention."""
    shape = Gemma3TextConfig(
        vocab_size=WORDS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        max_position_embeddings=LONGEST,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention"] * 2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
    )
    return Gemma3ForCausalLM(shape)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("directory", type=Path)
    arguments.add_argument("--window", type=int, default=0)
    arguments.add_argument("--wide", action="store_true")
    options = arguments.parse_args()
    torch.manual_seed(SEED)
    model = windowed(options.window) if options.window else llama(32, 16, 16, 128) if options.wide else llama()
    # In float32 the greedy choice does not depend on the order of a sum.
    model.to(torch.float32).save_pretrained(options.directory)
    tokenizer().save_pretrained(options.directory)


if __name__ == "__main__":
    main()
