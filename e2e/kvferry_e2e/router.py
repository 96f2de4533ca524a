"""The routers that people run: vllm-router, smg, and the example proxies of vLLM's repository."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from kvferry_e2e.client import HOST, get
from kvferry_e2e.environment import cache_root
from kvferry_e2e.instance import Instance
from kvferry_e2e.server import Server, free_port
from kvferry_e2e.steps import Say, run_step

Kind = Literal["vllm-router", "vllm-router mooncake", "smg", "toy proxy", "mooncake proxy"]
PACKAGES = ("vllm-router==0.1.17", "smg==1.13.0", "httpx==0.28.1")
# Files of vLLM's repository, which no package contains; they are used where someone has put them.
EXAMPLES = {"toy proxy": "toy_proxy_server.py", "mooncake proxy": "mooncake_connector_proxy.py"}


def routers_environment(say: Say) -> Path:
    """The folder with the routers' commands; built once per machine."""
    folder = cache_root() / f"routers-py{sys.version_info.major}{sys.version_info.minor}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    ready = folder / "ready"
    with open(folder.with_name(folder.name + ".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists() or ready.read_text() != " ".join(PACKAGES):
            shutil.rmtree(folder / "venv", ignore_errors=True)
            folder.mkdir(exist_ok=True)
            run_step("routers 1/2", (sys.executable, "-m", "venv", str(folder / "venv")), folder / "build.log", say)
            pip = (str(folder / "venv/bin/python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "install")
            run_step("routers 2/2", (*pip, *PACKAGES), folder / "build.log", say)
            ready.write_text(" ".join(PACKAGES))
    return folder / "venv" / "bin"


@cache
def example(kind: Kind) -> Path | None:
    found = cache_root() / "vllm-examples" / EXAMPLES[kind]
    return found if found.exists() else None


def _url(port: int) -> str:
    return f"http://{HOST}:{port}"


@dataclass(kw_only=True)
class Router(Server):
    kind: Kind
    commands: Path
    prefills: Sequence[Instance]
    decodes: Sequence[Instance]
    metrics: int = field(default_factory=free_port)
    _told: bool = False

    def command(self) -> list[str]:
        here = ["--host", HOST, "--port", str(self.port)]
        if self.kind == "smg":
            routing = ["--policy", "round_robin", "--pd-disaggregation", "--backend", "vllm"]
            return [str(self.commands / "smg"), "launch", *here, *routing, "--prometheus-port", str(self.metrics)]
        urls = {True: "--prefill", False: "--decode"}
        servers = [(urls[i in self.prefills], i) for i in (*self.prefills, *self.decodes)]
        if self.kind == "toy proxy":
            ports = {"prefiller": self.prefills, "decoder": self.decodes}
            words = []
            for name, some in ports.items():
                words += [f"--{name}-hosts", *[HOST] * len(some), f"--{name}-ports", *[str(i.port) for i in some]]
            return [str(self.commands / "python"), str(example(self.kind)), *here, *words]
        words = []
        for option, instance in servers:
            words += [option, _url(instance.port)]
            if option == "--prefill" and "mooncake" in self.kind:
                words.append(str(instance.bootstrap))
        if self.kind == "mooncake proxy":
            return [str(self.commands / "python"), str(example(self.kind)), *here, *words]
        flow = "mooncake" if "mooncake" in self.kind else "nixl"
        routing = ["--policy", "round_robin", "--vllm-pd-disaggregation", "--kv-connector", flow]
        # A request that fails is not sent again: the test wants its error. A restarted server is used at once.
        quiet = ["--disable-retries", "--disable-circuit-breaker", "--prometheus-port", str(self.metrics)]
        quiet += ["--health-check-interval-secs", "1", "--health-success-threshold", "1"]
        return [str(self.commands / "vllm-router"), *here, *routing, *quiet, *words]

    def environment(self) -> dict[str, str]:
        return {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "KVFERRY_", "PYTHON"))} | {
            "PYTHONUNBUFFERED": "1"
        }

    def is_ready(self) -> bool:
        if self.kind.endswith("proxy"):
            # It has no page for this; an error page shows that it serves.
            try:
                get(self.port, "/healthcheck", timeout_s=10)
            except RuntimeError:
                return True
            except OSError:
                return False
            return True
        if not super().is_ready():
            return False
        return self.kind != "smg" or self._has_all_servers()

    def _has_all_servers(self) -> bool:
        """Tells smg its servers, with the name of a connector that it knows: see docs/vllm-routers.md."""
        wanted = {_url(i.port): "prefill" for i in self.prefills} | {_url(i.port): "decode" for i in self.decodes}
        for url, role in () if self._told else wanted.items():
            labels = {"kv_connector": "NixlConnector"}
            self._post("/workers", {"url": url, "worker_type": role, "runtime": "vllm", "labels": labels})
        self._told = True
        workers = json.loads(get(self.port, "/workers"))["workers"]
        return {worker["url"] for worker in workers if worker["status"] == "ready"} == wanted.keys()

    def _post(self, path: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(_url(self.port) + path, json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30).close()
