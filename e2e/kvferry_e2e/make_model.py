"""Write the tiny Llama that the end-to-end test serves (run with the vLLM environment's Python).

Made here rather than fetched, so that the test needs no model hub, and seeded, so that two machines
serve the same weights. `initializer_range` is far above the usual: with the default every output is
one and the same token, which would agree between two engines whatever happened to the KV cache.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 20_240_731
VOCABULARY = 320
SENTENCE = "the quick brown fox jumps over the lazy dog while a ferry carries the key value cache across the river"


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE over one sentence: every byte is a token, so any text can be encoded."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    raw.train_from_iterator([SENTENCE], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


def main(target: Path) -> None:
    words = tokenizer()
    if len(words) != VOCABULARY:
        raise ValueError(f"{len(words)} tokens, but the test asks with ids up to {VOCABULARY}")
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=0.25,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        torch_dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(target)
    words.save_pretrained(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
