"""The settings of `KVFerryConnector` (``kv_connector_extra_config`` and the environment), and those that are vLLM's."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvferry._engine.address import with_port
from kvferry._engine.secret import PeerSettings
from kvferry._engine.settings import Reader, StoreSettings, check_known

# Read by vLLM itself from the mapping that has the settings of the store.
_OF_VLLM = (
    "block_size",
    "blocks_per_chunk",
    "canonical_layout",
    "offload_prompt_only",
    "self_describing_kv_events",
    "spec_module_path",
    "spec_name",
)


def store_settings(config: Mapping[str, Any], where: str = "kv_connector_extra_config") -> StoreSettings:
    """Those of `KVFerryOffloadingSpec` and `KVFerryTier`. Raises ValueError."""
    return StoreSettings.of(config, where, _OF_VLLM)


@dataclass(frozen=True, kw_only=True)
class Settings(PeerSettings):
    """What a deployment may choose. See docs/vllm.md."""

    WHERE = "kv_connector_extra_config"

    # "host" or "host:port" that the agents of the ranks listen on. A port fits engines of one rank only.
    address: str | None = None
    # Names of transports, separated by commas; None for all.
    transports: str | None = None
    # Seconds that a request's handoff may take in all.
    timeout: float
    # What two engines must have in common, instead of the model's name and revision.
    model: str | None = None
    # The part of the cache's blocks that may be held for a decode that has not asked for them. As many again may belong
    # to loads whose prefill has not answered.
    idle_share: float

    @staticmethod
    def of(config: Mapping[str, Any]) -> Settings:
        """Raises ValueError for a setting that does not exist or has a wrong value."""
        # vLLM logs this configuration, so a secret must not be in it.
        says = f"KVFerryConnector has no setting {{}} in {Settings.WHERE}; it has {{}}"
        check_known(config, [it.name for it in fields(Settings)], says)
        read = Reader(config, Settings.WHERE)
        return Settings(
            address=read.text("address"),
            transports=read.text("transports"),
            timeout=read.number("timeout", 480.0, 1, 86_400, must="1 to 86400 seconds"),
            secret_file=read.path("secret_file"),
            model=read.text("model"),
            producers=read.texts("producers"),
            idle_share=read.number("idle_share", 0.5, math.ulp(0.0), 1, must="more than 0 and at most 1"),
        )

    def idle_blocks(self, blocks: int) -> int:
        """The number of blocks that `idle_share` is of a cache, at least one."""
        return max(1, int(blocks * self.idle_share))

    def listen(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """The ``host:port`` to listen on; None leaves it to kvferry's own environment and default, loopback.

        ``VLLM_HOST_IP`` says that the hosts of a deployment reach each other there.
        """
        host = self.address or ("" if environ.get("KVFERRY_LISTEN") else environ.get("VLLM_HOST_IP"))
        return with_port(host) if host else None
