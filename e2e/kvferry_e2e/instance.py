"""One vLLM server, with KVFerryConnector or with one of vLLM's connectors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from kvferry_e2e.client import HOST, MODEL, Counters, get
from kvferry_e2e.records import Records
from kvferry_e2e.server import Server, free_port

Role = Literal["prefill", "decode"]
Connector = Literal["MooncakeConnector", "NixlConnector", "KVFerryConnector"]
# The connector's own time-out, lowered from its 480 s. A prefill keeps unsent blocks and waits for
# its own computation that long; a decode waits 60 s longer for a silent prefill
# (`receive_kv_from_single_worker`).
ABORT_TIMEOUT_S = 10
DECODE_WAIT_S = ABORT_TIMEOUT_S + 60
MAX_MODEL_TOKENS = 2048
PLUG = Path(__file__).parent.parent / "plug"


@dataclass(kw_only=True)
class Instance(Server):
    """`role` chooses the core, and for MooncakeConnector the KV role; the others have both roles. `recorded`: whether
    the calls of MooncakeConnector's engine are recorded.
    """

    role: Role
    model: str = "llama"
    # None: none, unless there is a `store`.
    connector: Connector | None = "MooncakeConnector"
    prefix_caching: bool = False
    tensor_parallel: int = 1
    recorded: bool = True
    # Not bound to a core: beside several ranks, or for threads of kvferry that must run within a second.
    unbound: bool = False
    # For the KV cache.
    cache_mib: int = 1024
    # `kv_load_failure_policy` of vLLM.
    policy: Literal["fail", "recompute"] = "fail"
    # Settings of KVFerryConnector.
    settings: Mapping[str, Any] = field(default_factory=dict)
    # Inside of MultiConnector, with vLLM's ExampleConnector.
    beside_example: bool = False
    # Settings of KVFerryOffloadingSpec, which the instance has instead of a connector for handoffs.
    store: Mapping[str, Any] | None = None
    options: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    bootstrap: int = field(default_factory=free_port)

    @property
    def records(self) -> Records:
        return Records(self.setup.folder / self.name)

    @property
    def stored(self) -> Path:
        """Where ExampleConnector keeps prompts."""
        return self.setup.scratch / f"{self.name}-example"

    def start(self) -> Self:
        self.records.folder.mkdir(parents=True)
        return super().start()

    def transfer_config(self) -> dict[str, Any]:
        if self.store is not None:
            spec = {"spec_name": "KVFerryOffloadingSpec", "spec_module_path": "kvferry.vllm", **self.store}
            return {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": spec,
            }
        if self.connector == "KVFerryConnector":
            ours: dict[str, Any] = {"kv_connector": "KVFerryConnector", "kv_role": "kv_both"}
            ours["kv_connector_extra_config"] = dict(self.settings)
            if not self.beside_example:
                return {**ours, "kv_load_failure_policy": self.policy}
            stored = {"shared_storage_path": str(self.stored)}
            example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": stored}
            return {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": self.policy,
                "kv_connector_extra_config": {"connectors": [ours, example]},
            }
        if self.connector == "NixlConnector":
            return {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_buffer_device": "cpu",
                "kv_load_failure_policy": self.policy,
            }
        return {
            "kv_connector": "MooncakeConnector",
            "kv_role": "kv_producer" if self.role == "prefill" else "kv_consumer",
            "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
        }

    def command(self) -> list[str]:
        options = {
            "--model": str(self.setup.environment.models / self.model),
            "--served-model-name": MODEL,
            # The kernel for bfloat16 crashes on virtual machines without AMX tiles.
            "--dtype": "float32",
            "--max-model-len": str(MAX_MODEL_TOKENS),
            "--host": HOST,
            "--port": str(self.port),
            "--kv-cache-memory-bytes": str(self.cache_mib << 20),
            "--tensor-parallel-size": str(self.tensor_parallel),
        }
        if self.connector is not None or self.store is not None:
            options["--kv-transfer-config"] = json.dumps(self.transfer_config())
        flags = [
            "--enforce-eager",
            "--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching",
        ]
        server = [str(self.setup.environment.python), "-m", "vllm.entrypoints.openai.api_server"]
        return server + [word for option in options.items() for word in option] + flags + list(self.options)

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "KVFERRY_", "MC_", "PYTHON"))}
        cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
        bound = {"VLLM_CPU_OMP_THREADS_BIND": cores[0 if self.role == "prefill" else -1]}
        if self.tensor_parallel > 1 or self.unbound:
            # A rank bound to the core of a polling engine may not run for a minute, measured on Linux 6.18.
            bound = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        own: dict[str, str] = {}
        if self.connector == "MooncakeConnector":
            own = {
                "KVFERRY_E2E_MOONCAKE": "1",
                "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(ABORT_TIMEOUT_S),
                **({"KVFERRY_E2E_RECORD": str(self.records.folder)} if self.recorded else {}),
            }
        if self.connector == "NixlConnector":
            own = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.bootstrap)}
        return {
            **kept,
            # KVFerryConnector needs nothing but the wheel. The plug has engines poll without `sched_yield`.
            "PYTHONPATH": f"{PLUG}:{self.setup.site}",
            **own,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            # Killed servers leave sockets and files behind; here they are removed with the run.
            "TMPDIR": str(self.setup.temporary),
            "VLLM_RPC_BASE_PATH": str(self.setup.temporary),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(self.setup.folder / "vllm-cache"),
            "VLLM_CONFIG_ROOT": str(self.setup.folder / "vllm-config"),
            "VLLM_HOST_IP": HOST,
            **bound,
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self.bootstrap),
            **self.setup.engine_env,
            **self.env,
        }

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric's values whose labels contain `label`; 0 if there are none."""
        lines = [line.rpartition(" ") for line in get(self.port, "/metrics").splitlines()]
        return sum(float(value) for key, _, value in lines if key.split("{")[0] == name and label in key)

    def counters(self) -> Counters:
        return Counters.of(self.port)
