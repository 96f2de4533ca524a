"""A name for the weights at a path, from samples of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

# Of each file of weights, so much at so many places is read.
_SAMPLES = 16
_SAMPLE_BYTES = 64 << 10
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".engine")
_CONFIGURATIONS = ("config.json", "adapter_config.json", "hf_quant_config.json")


def weights_of(path: str | Path | None) -> str | None:
    """A hash of the configuration and of samples of the weights, which other weights of one shape do not have.

    `path`: of a directory or a file; None if there is neither. Raises OSError if a file can't be read.
    """
    if path is None or not Path(path).exists():
        return None
    found = hashlib.sha256()
    for file in sorted(Path(path).iterdir()) if Path(path).is_dir() else [Path(path)]:
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
