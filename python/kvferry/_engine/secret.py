"""The secret that the engines of a deployment share, and who may read KV without one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import kvferry
from kvferry._engine.address import is_loopback


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """Settings of an adapter that exchanges KV with other engines."""

    # Where the settings come from, for errors.
    WHERE: ClassVar[str]

    # A file with the secret that all engines share.
    secret_file: Path | None = None
    # Hosts, networks and names that KV may come from; None: this host and its network, or any with a secret.
    producers: tuple[str, ...] | None = None

    def secret(self) -> bytes | None:
        """The secret; None leaves it to kvferry's own environment. Raises ValueError if the file has none."""
        if self.secret_file is None:
            return None
        try:
            secret = self.secret_file.read_bytes().rstrip()
        except OSError as error:
            raise ValueError(f"{self.WHERE}: secret_file can't be read: {error}") from error
        if not secret:
            raise ValueError(f"{self.WHERE}: secret_file {self.secret_file} is empty")
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

    def is_open_to_hosts(self, agent: kvferry.Agent) -> bool:
        """Whether every host that reaches the agent can read its KV: it listens beyond this host, without a secret."""
        return not is_loopback(agent.local_address[0]) and not self.has_secret()
