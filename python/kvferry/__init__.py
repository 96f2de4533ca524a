"""kvferry moves KV cache for LLM serving: registered memory, between processes and hosts.

>>> import kvferry
>>> with kvferry.Agent(listen="127.0.0.1:0") as prefill, kvferry.Agent(listen="127.0.0.1:0") as decode:
...     source, destination = bytearray(b"KV of block 7"), bytearray(13)
...     local, remote = prefill.register(source), decode.register(destination).remote()
...     batch = kvferry.Batch()
...     batch.push(local, 0, remote, 0, 13)
...     stats = prefill.peer(decode.address).write(batch)
...     bytes(destination)
b'KV of block 7'

Set ``KVFERRY_LOG`` (``info``, ``kvferry=debug``, …) for a log on stderr; otherwise kvferry prints nothing.

Times are in seconds. At the interpreter's exit, agents are shut down; calls of other threads then raise SystemExit.
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
    InterruptedError,  # noqa: A004 - a subclass of the builtin
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
    Allocation,
    Batch,
    BlockManager,
    Blocks,
    FileRegion,
    Files,
    Notification,
    Peer,
    PeerSummary,
    Pending,
    Pin,
    Put,
    Region,
    RemoteRegion,
    RetentionConfig,
    Space,
    Store,
    Transfer,
    TransferStats,
    Watch,
    __version__,
)

__all__ = [
    "AccessDeniedError",
    "Agent",
    "Allocation",
    "AuthFailedError",
    "AuthRequiredError",
    "AuthUnsupportedError",
    "Batch",
    "BlockManager",
    "Blocks",
    "BusyError",
    "CancelledError",
    "ChecksumError",
    "DeadlineError",
    "Error",
    "FileRegion",
    "Files",
    "ForkedError",
    "InternalError",
    "InterruptedError",
    "InvalidArgumentError",
    "IoError",
    "NotRegisteredError",
    "Notification",
    "OutOfBoundsError",
    "OverlapError",
    "Peer",
    "PeerClosedError",
    "PeerResetError",
    "PeerSilentError",
    "PeerSummary",
    "Pending",
    "Pin",
    "ProtocolError",
    "Put",
    "QuarantinedError",
    "Region",
    "RemoteRegion",
    "RetentionConfig",
    "RevokedError",
    "ShutdownError",
    "Space",
    "StaleIncarnationError",
    "Store",
    "TooLargeError",
    "Transfer",
    "TransferStats",
    "UnreachableError",
    "UnsupportedError",
    "VersionMismatchError",
    "Watch",
    "__version__",
]
