"""A plug-in of SGLang, which each of its processes loads: what its prefill on a CPU needs.

With a sender that takes indices in host memory, the prefill scheduler pins a tensor and makes a `torch.cuda.Event`.
"""

from __future__ import annotations

import importlib


def register() -> None:
    conn = importlib.import_module("sglang.srt.disaggregation.mooncake.conn")
    conn.MooncakeKVSender.supports_host_tensor_indices = False
