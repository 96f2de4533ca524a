"""What the rows share: the environment, the folders, the servers of a run, and its options."""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvferry_e2e.environment import Environment, large_model
from kvferry_e2e.instance import Instance
from kvferry_e2e.overlay import kvferry_overlay
from kvferry_e2e.progress import Progress
from kvferry_e2e.server import Setup

MIB = 1 << 20
PUT_BLOCKS = "vllm:kv_offload_kvferry_put_blocks_total"
# KV heads of both models. The store has a block for each of them, for each block of the engine.
HEADS = 2
# Instances and this program share few cores: see `ON_BUSY_CORES` of the end-to-end test.
ENGINE = {"KVFERRY_SILENCE_MS": "20000"}


def token_bytes(model: Path) -> int:
    """KV of a token, in float32."""
    config = json.loads((model / "config.json").read_text())
    return int(config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 2 * 4)


class Bench:
    """One for all rows of a run. What a row has left running is killed at its end."""

    def __init__(
        self,
        stack: ExitStack,
        environment: Environment,
        wheel: Path,
        options: argparse.Namespace,
        progress: Progress,
    ) -> None:
        self.environment, self.options, self._progress = environment, options, progress
        self.say = progress.say
        self.rounds: int = options.rounds
        prefix = "kvferry-bench-offload-"
        scratch = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
        self.scratch = Path(stack.enter_context(scratch))
        kept = tempfile.TemporaryDirectory(prefix=prefix, dir=options.folder, ignore_cleanup_errors=True)
        self._kept = Path(stack.enter_context(kept))
        self.site = kvferry_overlay(environment, wheel, self.scratch / "site", self.say)
        self._servers: list[Instance] = []
        stack.callback(self.kill_all)

    @property
    def large(self) -> str:
        """The `model` of an `Instance` that takes seconds to compute a long prompt."""
        return str(large_model(self.environment, self.say))

    def folder(self, name: str) -> Path:
        """A new folder on the disk that is measured."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._kept))

    def start(self, name: str, *, store: dict[str, Any] | None, **more: Any) -> Instance:
        """A server, not yet ready. `store`: settings of KVFerryOffloadingSpec; None: without a store."""
        setup = Setup(self.environment, self.site, self.scratch, self.scratch, ENGINE)
        number = len(self._servers)
        server = Instance(
            name=f"{number}-{name}",
            role="decode",
            setup=setup,
            connector=None,
            recorded=False,
            unbound=True,
            store=store,
            **more,
        )
        self._servers.append(server)
        return server.start()

    def ready(self, *servers: Instance) -> None:
        self._progress.ready(*servers)

    def kill_all(self) -> None:
        """Ends what a row has left running. Also those that are stopped."""
        for server in self._servers:
            server.kill()
