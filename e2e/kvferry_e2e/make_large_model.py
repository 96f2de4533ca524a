"""Write a model that takes seconds to compute a long prompt (run with the vLLM environment's Python).

299 million weights, 0.6 GFLOP and 20 KiB of KV per token in float32. Per operation that is four times the KV of
Llama 3.1 8B in bfloat16: a store is not made to look good by a small KV.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from make_model import SEED, llama, tokenizer

HIDDEN = 1024
LAYERS = 20


def main(target: Path) -> None:
    words = tokenizer()
    torch.manual_seed(SEED)
    model = llama(
        {
            "vocab_size": len(words),
            "hidden_size": HIDDEN,
            "intermediate_size": 4 * HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HIDDEN // 64,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 4096,
            # As large as the tiny models' for the width: with the default all outputs are one token.
            "initializer_range": 4 / HIDDEN**0.5,
            "bos_token_id": words.bos_token_id,
            "eos_token_id": words.eos_token_id,
            "torch_dtype": "float32",
        }
    )
    model.save_pretrained(target)
    words.save_pretrained(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
