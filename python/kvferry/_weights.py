"""A name for the weights in a directory, from samples of its files."""

from __future__ import annotations

import hashlib
from pathlib import Path

# Of each file of weights, so much at so many places is read.
_SAMPLES = 16
_SAMPLE_BYTES = 64 << 10
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".engine")
_CONFIGURATIONS = ("config.json", "adapter_config.json", "hf_quant_config.json")


def weights_of(folder: Path) -> str:
    """A hash of the configuration and of samples of the weights, which other weights of one shape do not have.

    Raises OSError if a file can't be read.
    """
    found = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.name in _CONFIGURATIONS:
            found.update(file.read_bytes())
        elif file.suffix in _WEIGHTS:
            nbytes = file.stat().st_size
            found.update(f"{file.name} {nbytes} ".encode())
            with open(file, "rb") as weights:
                for sample in range(_SAMPLES):
                    weights.seek(max(0, nbytes - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                    found.update(weights.read(_SAMPLE_BYTES))
    return found.hexdigest()[:32]
