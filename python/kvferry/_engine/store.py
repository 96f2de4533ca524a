"""The store of an adapter, with the agent that registers its memory."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import kvferry
from kvferry._engine.settings import StoreSettings

# How long the blocks of a put wait for space in a full store. They keep the pages of their request meanwhile.
PUT_WAIT_S = 2.0
# For how long an engine that starts tries again to open a store whose processes do not answer: another rank may be
# reading a large store after a crash, or be stopped by a debugger. Each try waits by itself, too.
BUSY_S = 180.0
BUSY_PAUSE_S = 1.0
# How long a put waits for its turn, and so how long the end of an engine may. A step of a long prefill may compute more
# than the disk takes meanwhile. An engine that needs the pages sooner cancels what does not begin soon.
PUT_TURN_S = 10.0
# Puts are not cancelled once they have begun, four at a time, so each is no larger than that: together 0.3 s of a disk
# that takes 200 MB/s.
PUT_BYTES_MAX = 16 << 20


@dataclass
class OpenStore:
    """A store with its agent. `close` ends both."""

    agent: kvferry.Agent
    store: kvferry.Store

    def close(self) -> None:
        self.store.close()
        self.agent.shutdown()


def open_store(settings: StoreSettings, host_bytes: int, logger: logging.Logger) -> OpenStore | None:
    """None, with a warning, if the store can't be used now. Raises ValueError if a setting is wrong."""
    # The agent registers memory for the store. Its peer, if any, is this process's agent that copies pages of a GPU.
    agent = kvferry.Agent(listen="127.0.0.1:0", transports="local")
    try:
        store = _open(agent, settings, host_bytes, logger)
    except kvferry.InvalidArgumentError as error:
        agent.shutdown()
        raise ValueError(f"kvferry's store can't be opened with these settings: {error}") from error
    except (kvferry.Error, OSError) as error:
        agent.shutdown()
        where = ", ".join(settings.directories)
        logger.warning(
            "kvferry's store in %s can't be opened, so no block is stored or found until the engine is restarted: %s",
            where,
            error,
        )
        return None
    return OpenStore(agent, store)


def _open(agent: kvferry.Agent, settings: StoreSettings, host_bytes: int, logger: logging.Logger) -> kvferry.Store:
    until = None
    while True:
        try:
            return kvferry.Store(
                agent,
                list(settings.directories),
                settings.disk_bytes,
                segment_bytes=None if settings.segment_mib is None else settings.segment_mib << 20,
                blocks_max=settings.blocks_max,
                direct=settings.direct,
                host_bytes=host_bytes,
                put_wait=PUT_WAIT_S,
                adopt_empty=settings.adopt_empty,
                must_exist=settings.must_exist,
                objects=settings.object,
                object_options=dict(settings.object_options) if settings.object else None,
            )
        except kvferry.BusyError as error:
            now = time.monotonic()
            if until is None:
                until = now + BUSY_S
                where = ", ".join(settings.directories)
                logger.warning("kvferry's store in %s can't be opened yet, and is tried again: %s", where, error)
            elif now >= until:
                raise
            time.sleep(BUSY_PAUSE_S)
