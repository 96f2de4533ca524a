"""Write the tiny models that the end-to-end test serves (run with the vLLM environment's Python).

Made here rather than fetched, so that the test needs no model hub, and seeded, so that two machines
serve the same weights. `initializer_range` is far above the usual: with the default every output is
one and the same token, which would agree between two engines whatever happened to the KV cache.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

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


def llama(common: dict[str, Any]) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**common))


def window(common: dict[str, Any]) -> PreTrainedModel:
    """Every other layer attends to the last 256 tokens only."""
    layers = ["sliding_attention", "full_attention"] * 2
    more = {"sliding_window": 256, "layer_types": layers, "tie_word_embeddings": False}
    return Gemma3ForCausalLM(Gemma3TextConfig(**common, **more))


def state(common: dict[str, Any]) -> PreTrainedModel:
    """Every other layer is a Mamba layer."""
    mamba = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_chunk_size": 64}
    layers = {"layer_types": ["mamba", "attention"] * 2, "position_embedding_type": "rope"}
    dense = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 512}
    return GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**common, **mamba, **layers, **dense))


# "other" has the layout of "llama" and other weights.
MODELS = {"llama": llama, "other": llama, "window": window, "state": state}


def main(target: Path) -> None:
    words = tokenizer()
    if len(words) != VOCABULARY:
        raise ValueError(f"{len(words)} tokens, but the test asks with ids up to {VOCABULARY}")
    common = {
        "vocab_size": len(words),
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "initializer_range": 0.25,
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
        "torch_dtype": "float32",
    }
    for number, (name, make) in enumerate(MODELS.items()):
        torch.manual_seed(SEED + number)
        make(common).save_pretrained(target / name)
        words.save_pretrained(target / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
