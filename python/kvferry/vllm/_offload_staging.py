"""Stages: host memory between the engine's pages on a GPU and the store, which reads and writes host memory only.

kvferry copies between pages and stages, behind the engine's stream. A put begins once the pages are copied: then the
engine may use them again. A load is copied to the pages once the store has read all of it.
"""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import kvferry
from kvferry._engine.quiet import is_quiet

# The length of a stage is a power of two, so that jobs of other lengths can use the stage again.
_LEAST_BYTES = 1 << 20
_FREE_BYTES_MAX = 256 << 20
# A copy waits for the steps that the engine's stream has, which may take long.
_COPY_S = 120.0


class Stage:
    """Memory of one job, which the store and the copies share."""

    def __init__(self, store: kvferry.Agent, copies: kvferry.Agent, nbytes: int) -> None:
        try:
            memory = mmap.mmap(-1, nbytes)
        except OSError as error:
            raise kvferry.IoError(f"no host memory for {nbytes} bytes of blocks on a GPU: {error}") from error
        self.region = store.register(memory, "none")
        try:
            self._lent = copies.register(memory, "rw")
        except kvferry.Error:
            store.unregister(self.region)
            raise
        self.nbytes = nbytes

    @property
    def remote(self) -> kvferry.RemoteRegion:
        """The memory as the other side of copies."""
        return self._lent.remote()

    def close(self, store: kvferry.Agent, copies: kvferry.Agent) -> None:
        # An agent that can't unregister memory keeps it until nothing touches it any more.
        for agent, region in ((copies, self._lent), (store, self.region)):
            with suppress(kvferry.Error):
                agent.unregister(region)


class Stages:
    """Stages that are used again, and an agent that copies between them and pages. `stream` returns the stream of the
    engine.
    """

    def __init__(self, store: kvferry.Agent, stream: Callable[[], Any]) -> None:
        self._store = store
        self._stream = stream
        # The agent copies from and to itself: no other process has its secret.
        self.agent = kvferry.Agent(listen="127.0.0.1:0", transports="local", secret=secrets.token_hex(32))
        self._self = self.agent.peer(self.agent.address)
        self._free: list[Stage] = []

    def take(self, nbytes: int) -> Stage:
        wanted = max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())
        for at, stage in enumerate(self._free):
            if stage.nbytes == wanted:
                return self._free.pop(at)
        return Stage(self._store, self.agent, wanted)

    def give(self, stage: Stage) -> None:
        """Gives a stage back. Nothing may copy from or to it any more."""
        self._free.append(stage)
        while sum(it.nbytes for it in self._free) > _FREE_BYTES_MAX:
            self._free.pop(0).close(self._store, self.agent)

    def out(self, batch: kvferry.Batch) -> kvferry.Transfer:
        """Copies pages to a stage, after the work that the engine's stream has now."""
        return self._self.write_async(batch, timeout=_COPY_S, after=self._stream())

    def back(self, batch: kvferry.Batch) -> kvferry.Transfer:
        """Copies a stage to pages, after the work that the engine's stream has now: the last readers of the pages."""
        return self._self.read_async(batch, timeout=_COPY_S, after=self._stream())

    def close(self) -> None:
        """Waits for copies of the pages. The engine may free the pages then."""
        self.agent.shutdown()


class _Staged:
    """An operation in two parts, used by the engine's thread. Its stage is given back when both parts have ended."""

    def __init__(self, stages: Stages, stage: Stage) -> None:
        self._stages, self._stage = stages, stage
        self._has_ended = False
        self._outcome: Any = None
        self._error: BaseException | None = None

    def _begun(self, begin: Callable[[], Any]) -> Any:
        try:
            return begin()
        except BaseException:
            self._stages.give(self._stage)
            raise

    def _end(self, outcome: Any = None, error: BaseException | None = None) -> None:
        self._has_ended, self._outcome, self._error = True, outcome, error
        self._stages.give(self._stage)

    def _go_on(self, timeout: float | None) -> bool:
        """Carries the operation on. True once it has ended."""
        raise NotImplementedError

    def done(self) -> bool:
        return self._has_ended or self._go_on(0)

    def wait(self, timeout: float | None = None) -> Any:
        """The outcome of the store's part; None if it is not known in time. Raises the error of a part that failed."""
        if not self._has_ended and not self._go_on(timeout):
            return None
        if self._error is not None:
            raise self._error
        return self._outcome


class StagedPut(_Staged):
    """Copies pages to a stage, from where `put` puts them into the store."""

    def __init__(self, stages: Stages, stage: Stage, batch: kvferry.Batch, put: Callable[[], Any]) -> None:
        super().__init__(stages, stage)
        self._begin_put = put
        self._put: Any = None
        self._copy = self._begun(lambda: stages.out(batch))

    def leave_pages(self) -> None:
        """Waits until the pages are copied."""
        with suppress(Exception):
            self._copy.wait()

    def cancel(self) -> None:
        (self._copy if self._put is None else self._put).cancel()

    def _go_on(self, timeout: float | None) -> bool:
        try:
            if self._put is None:
                if self._copy.wait(timeout) is None:
                    return False
                self._put = self._begin_put()
            outcome = self._put.wait(timeout)
        except Exception as error:
            self._end(error=error)
            return True
        if outcome is not None:
            self._end(outcome)
        return self._has_ended


class StagedGet(_Staged):
    """Reads `blocks` blocks of the store into a stage, from where they are copied to pages."""

    def __init__(self, stages: Stages, stage: Stage, batch: kvferry.Batch, get: Callable[[], Any], blocks: int) -> None:
        super().__init__(stages, stage)
        self._batch, self._blocks = batch, blocks
        self._get = self._begun(get)
        self._copy: Any = None

    def leave_pages(self) -> None:
        """Waits until the pages are written."""
        with suppress(Exception):
            self.wait()

    def cancel(self) -> None:
        self._get.cancel()

    def _go_on(self, timeout: float | None) -> bool:
        try:
            if self._copy is None:
                found = self._get.wait(timeout)
                if found is None:
                    return False
                if found != self._blocks:
                    self._end(found)
                    return True
                self._copy = self._stages.back(self._batch)
            if self._copy.wait(timeout) is None:
                return False
        except Exception as error:
            # The pages are the engine's again once nothing writes them.
            if self._copy is not None and not is_quiet(self._copy, timeout):
                return False
            self._end(error=error)
            return True
        self._end(self._blocks)
        return True
