"""The settings of `KVFerryConnector`: ``kv_connector_extra_config`` and the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_TIMEOUT = 480.0
DEFAULT_IDLE_SHARE = 0.5


@dataclass(frozen=True)
class Settings:
    """What a deployment may choose. See docs/vllm.md."""

    # "host" or "host:port" that the agents of the ranks listen on. A port fits engines of one rank only.
    address: str | None = None
    # Names of transports, separated by commas; None for all.
    transports: str | None = None
    # Seconds that a request's handoff may take in all.
    timeout: float = DEFAULT_TIMEOUT
    # A file with the secret that all engines share.
    secret_file: Path | None = None
    # What two engines must have in common, instead of the model's name and revision.
    model: str | None = None
    # Hosts, networks and names that KV may come from; None: this host and its network, or any with a secret.
    producers: tuple[str, ...] | None = None
    # The part of the cache's blocks that may be held for a decode that has not asked for them. As many again may belong
    # to loads whose prefill has not answered.
    idle_share: float = DEFAULT_IDLE_SHARE

    @staticmethod
    def of(config: Mapping[str, Any]) -> Settings:
        """Raises ValueError for a setting that does not exist or has a wrong value."""
        known = set(Settings.__dataclass_fields__)
        # vLLM logs this configuration, so a secret must not be in it.
        unknown = sorted(set(config) - known)
        if unknown:
            raise ValueError(
                f"KVFerryConnector has no setting {', '.join(map(repr, unknown))} in kv_connector_extra_config; "
                f"it has {', '.join(sorted(known))}"
            )
        timeout = config.get("timeout", DEFAULT_TIMEOUT)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 1 <= timeout <= 86_400:
            raise ValueError(f"kv_connector_extra_config: timeout must be 1 to 86400 seconds, not {timeout!r}")
        share = config.get("idle_share", DEFAULT_IDLE_SHARE)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(f"kv_connector_extra_config: idle_share must be more than 0 and at most 1, not {share!r}")
        for name in ("address", "transports", "secret_file", "model"):
            if not isinstance(config.get(name), str | None):
                raise ValueError(f"kv_connector_extra_config: {name} must be a string, not {config[name]!r}")
        secret_file = config.get("secret_file")
        producers = config.get("producers")
        if isinstance(producers, str):
            producers = [it.strip() for it in producers.split(",") if it.strip()]
        if producers is not None and not (isinstance(producers, list) and all(isinstance(it, str) for it in producers)):
            raise ValueError(f"kv_connector_extra_config: producers must be a list of texts, not {producers!r}")
        return Settings(
            address=config.get("address") or None,
            transports=config.get("transports") or None,
            timeout=float(timeout),
            secret_file=Path(secret_file) if secret_file else None,
            model=config.get("model") or None,
            producers=None if producers is None else tuple(producers),
            idle_share=float(share),
        )

    def idle_blocks(self, blocks: int) -> int:
        """The number of blocks that `idle_share` is of a cache, at least one."""
        return max(1, int(blocks * self.idle_share))

    def listen(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """The ``host:port`` to listen on; None leaves it to kvferry's own environment and default, loopback.

        ``VLLM_HOST_IP`` says that the hosts of a deployment reach each other there.
        """
        if self.address:
            return _with_port(self.address)
        host = environ.get("VLLM_HOST_IP")
        if host and not environ.get("KVFERRY_LISTEN"):
            return _with_port(host)
        return None

    def secret(self) -> bytes | None:
        """The secret; None leaves it to kvferry's own environment. Raises ValueError if the file has none."""
        if self.secret_file is None:
            return None
        secret = self.secret_file.read_bytes().rstrip()
        if not secret:
            raise ValueError(f"kv_connector_extra_config: secret_file {self.secret_file} is empty")
        return secret

    def any_secret(self, environ: Mapping[str, str] = os.environ) -> bytes | None:
        """The secret, wherever it comes from; kvferry's agents read the environment in the same way."""
        secret = self.secret()
        if secret is None and environ.get("KVFERRY_SECRET_FILE"):
            secret = Path(environ["KVFERRY_SECRET_FILE"]).read_bytes().rstrip()
        if secret is None and environ.get("KVFERRY_SECRET"):
            secret = os.fsencode(environ["KVFERRY_SECRET"])
        return secret

    def has_secret(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether peers need a secret."""
        return bool(self.secret_file or environ.get("KVFERRY_SECRET_FILE") or environ.get("KVFERRY_SECRET"))


def _with_port(address: str) -> str:
    if address.startswith("["):
        return address if "]:" in address else f"{address}:0"
    colons = address.count(":")
    if colons > 1:
        return f"[{address}]:0"
    return address if colons else f"{address}:0"
