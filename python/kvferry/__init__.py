"""kvferry moves KV cache for LLM serving: registered memory, between processes and hosts.

>>> import kvferry
>>> with kvferry.Agent(listen="127.0.0.1:0") as prefill, kvferry.Agent(listen="127.0.0.1:0") as decode:
...     source, destination = bytearray(b"KV of block 7"), bytearray(13)
...     local, remote = prefill.register(source), decode.register(destination).remote()
...     batch = kvferry.Batch()
...     batch.push(local, 0, remote, 0, 13)
...     moved = prefill.peer(decode.address).write(batch)
...     bytes(destination)
b'KV of block 7'

Set ``KVFERRY_LOG`` (``info``, ``kvferry=debug``, …) to see on stderr what it does; otherwise it prints nothing.
"""

from __future__ import annotations

from kvferry._errors import (
    AccessDeniedError,
    AuthFailedError,
    AuthRequiredError,
    AuthUnsupportedError,
    BusyError,
    CancelledError,
    ChecksumError,
    DeadlineError,
    Error,
    ForkedError,
    InternalError,
    InterruptedError,  # noqa: A004 - it is one, too
    InvalidArgumentError,
    IoError,
    NotRegisteredError,
    OutOfBoundsError,
    OverlapError,
    PeerClosedError,
    PeerResetError,
    PeerSilentError,
    ProtocolError,
    QuarantinedError,
    RevokedError,
    ShutdownError,
    StaleIncarnationError,
    TooLargeError,
    UnreachableError,
    UnsupportedError,
    VersionMismatchError,
)
from kvferry._kvferry import (
    Agent,
    Batch,
    Moved,
    Notification,
    Peer,
    PeerSummary,
    Region,
    RemoteRegion,
    Transfer,
    __version__,
)

__all__ = [
    "AccessDeniedError",
    "Agent",
    "AuthFailedError",
    "AuthRequiredError",
    "AuthUnsupportedError",
    "Batch",
    "BusyError",
    "CancelledError",
    "ChecksumError",
    "DeadlineError",
    "Error",
    "ForkedError",
    "InternalError",
    "InterruptedError",
    "InvalidArgumentError",
    "IoError",
    "Moved",
    "NotRegisteredError",
    "Notification",
    "OutOfBoundsError",
    "OverlapError",
    "Peer",
    "PeerClosedError",
    "PeerResetError",
    "PeerSilentError",
    "PeerSummary",
    "ProtocolError",
    "QuarantinedError",
    "Region",
    "RemoteRegion",
    "RevokedError",
    "ShutdownError",
    "StaleIncarnationError",
    "TooLargeError",
    "Transfer",
    "UnreachableError",
    "UnsupportedError",
    "VersionMismatchError",
    "__version__",
]
