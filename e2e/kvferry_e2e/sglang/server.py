"""One server of SGLang, for prefill, for decode or for both, and SGLang's router."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvferry_e2e.client import HOST, Tokens, get
from kvferry_e2e.server import Server, free_port
from kvferry_e2e.sglang.environment import PLUG

NEW_TOKENS = 16
MAX_TOKENS = 1024
_rooms = itertools.count(1)


@dataclass(frozen=True)
class Reply:
    status: int
    body: Any

    @property
    def tokens(self) -> Tokens:
        return list(self.body["output_ids"]) if self.status == 200 else []

    def __str__(self) -> str:
        return f"HTTP {self.status} {json.dumps(self.body)[:300]}"


def generate(port: int, prompt: Tokens, timeout_s: float = 120, **more: Any) -> Reply:
    """`more`: other fields of the request."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True},
        **more,
    }
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        connection.request("POST", "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        is_json = response.getheader("Content-Type", "").startswith("application/json")
        return Reply(response.status, json.loads(text) if is_json else text.decode(errors="replace"))
    finally:
        connection.close()


def environment_of(
    site: Path, overlay: Path, engine: Path | None, scratch: Path, shim: str = "mooncake"
) -> dict[str, str]:
    """The environment of SGLang's processes. `engine`: the stock Mooncake, else kvferry's drop-in `shim` is used."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "KVFERRY_", "MC_", "PYTHON"))}
    folders = [PLUG, *([site] if engine is None else [engine]), overlay]
    return {
        **kept,
        "PYTHONPATH": ":".join(map(str, folders)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_HOST_IP": HOST,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MC_FORCE_TCP": "1",
        "TMPDIR": str(scratch),
        **({"KVFERRY_SHIMS": shim, "KVFERRY_LOG": "info"} if engine is None else {}),
    }


@dataclass(kw_only=True)
class SGLang(Server):
    role: Literal["both", "prefill", "decode"]
    overlay: Path
    # The folder of the stock Mooncake, or None for kvferry's drop-in.
    stock: Path | None = None
    shim: Literal["mooncake", "nixl"] = "mooncake"
    bootstrap: int = field(default_factory=free_port)

    def command(self) -> list[str]:
        options: dict[str, str] = {
            "--model-path": str(self.setup.environment.model),
            "--device": "cpu",
            # The default needs sgl_kernel's build for CPUs.
            "--attention-backend": "torch_native",
            "--dtype": "float32",
            "--max-total-tokens": "16384",
            "--context-length": str(MAX_TOKENS + NEW_TOKENS + 1),
            "--page-size": "16",
            "--mem-fraction-static": "0.1",
            "--host": HOST,
            "--port": str(self.port),
        }
        if self.role != "both":
            options |= {
                "--disaggregation-mode": self.role,
                "--disaggregation-transfer-backend": "nixl" if self.shim == "nixl" else "mooncake_tcp",
                "--disaggregation-bootstrap-port": str(self.bootstrap),
            }
        if self.role == "decode":
            # The default pins host memory.
            options["--disaggregation-decode-retraction-backup"] = "cpu_tensor"
        flags = ["--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup"]
        server = [str(self.setup.environment.python), "-m", "sglang.launch_server"]
        return server + [word for option in options.items() for word in option] + flags

    def environment(self) -> dict[str, str]:
        base = environment_of(self.setup.site, self.overlay, self.stock, self.setup.scratch, self.shim)
        return base | (dict(self.setup.engine_env) if self.stock is None else {})


@dataclass(kw_only=True)
class SGLangRouter(Server):
    prefills: Sequence[SGLang]
    decodes: Sequence[SGLang]
    overlay: Path
    metrics: int = field(default_factory=free_port)

    def command(self) -> list[str]:
        words = ["--host", HOST, "--port", str(self.port), "--prometheus-port", str(self.metrics)]
        words += ["--pd-disaggregation", "--policy", "round_robin"]
        # A request that fails is not sent again: the test wants its error.
        words += ["--disable-retries", "--disable-circuit-breaker"]
        for prefill in self.prefills:
            words += ["--prefill", f"http://{HOST}:{prefill.port}", str(prefill.bootstrap)]
        for decode in self.decodes:
            words += ["--decode", f"http://{HOST}:{decode.port}"]
        return [str(self.setup.environment.python), "-m", "sglang_router.launch_router", *words]

    def environment(self) -> dict[str, str]:
        return environment_of(self.setup.site, self.overlay, None, self.setup.scratch)

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError, RuntimeError):
            said: Mapping[str, Any] = json.loads(get(self.port, "/readiness", timeout_s=10))
            return bool(said["healthy_workers"] == len(self.prefills) + len(self.decodes))
        return False


def handoff(
    prefill: SGLang, decode: SGLang, prompt: Tokens, *, asked: Tokens | None = None, timeout_s: float = 120
) -> Reply:
    """What a router does: both get the request, with one room. Returns the decode's reply.

    `asked`: the prompt for the decode, if it is another one.
    """
    room = {"bootstrap_host": HOST, "bootstrap_port": prefill.bootstrap, "bootstrap_room": next(_rooms)}

    def compute() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            generate(prefill.port, prompt, timeout_s, **room)

    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(compute)
        reply = generate(decode.port, prompt if asked is None else asked, timeout_s, **room)
        waiting.result()
    return reply
