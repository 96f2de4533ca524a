"""Exceptions: one base, and one class for each kind of error that the core knows."""

from __future__ import annotations

import builtins
from typing import Final


class Error(Exception):
    """An error of kvferry.

    ``kind`` is the kind's name in snake case, the same in every language. For a transfer that ended early, ``quiesced``
    is True if no byte of it can still arrive, False if the peer could not confirm that, and None if nothing was in
    flight. ``context`` has the facts of the message by name, such as ``peer`` or ``region``.
    """

    kind: str = "error"
    quiesced: bool | None = None
    context: dict[str, str] = {}  # noqa: RUF012 - an instance with facts has its own

    def __init__(
        self, message: str = "", *, quiesced: bool | None = None, context: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.quiesced = quiesced
        self.context = {} if context is None else context


class InvalidArgumentError(Error, ValueError):
    """An argument is invalid: a zero length, lists of different lengths, a malformed address."""

    kind = "invalid_argument"


class OverlapError(Error):
    """A range to be registered overlaps a registered one."""

    kind = "overlap"


class NotRegisteredError(Error):
    """A range or region is not registered, or no longer."""

    kind = "not_registered"


class OutOfBoundsError(Error, IndexError):
    """A descriptor reaches beyond its region."""

    kind = "out_of_bounds"


class AccessDeniedError(Error, PermissionError):
    """The region's access does not allow the operation."""

    kind = "access_denied"


class RevokedError(Error):
    """The region was unregistered while it was in use."""

    kind = "revoked"


class QuarantinedError(Error):
    """Memory that was unregistered may still be written by a process that does not answer."""

    kind = "quarantined"


class UnreachableError(Error, ConnectionError):
    """The peer can't be connected to."""

    kind = "unreachable"


class PeerResetError(Error, ConnectionError):
    """The connection to the peer broke."""

    kind = "peer_reset"


class PeerSilentError(Error, ConnectionError):
    """The peer is connected but does not answer."""

    kind = "peer_silent"


class PeerClosedError(Error, ConnectionError):
    """The peer ended the session."""

    kind = "peer_closed"


class AuthRequiredError(Error, PermissionError):
    """The peer requires a secret and this agent has none."""

    kind = "auth_required"


class AuthUnsupportedError(Error, PermissionError):
    """This agent has a secret and the peer has none."""

    kind = "auth_unsupported"


class AuthFailedError(Error, PermissionError):
    """The secrets of the two agents differ."""

    kind = "auth_failed"


class VersionMismatchError(Error):
    """The two agents share no protocol version."""

    kind = "version_mismatch"


class StaleIncarnationError(Error):
    """A handle belongs to an earlier incarnation of the peer."""

    kind = "stale_incarnation"


class DeadlineError(Error, TimeoutError):
    """The call or transfer timed out."""

    kind = "deadline"


class CancelledError(Error):
    """The transfer was cancelled."""

    kind = "cancelled"


class InterruptedError(Error, builtins.InterruptedError):
    """A signal ended the call. Rare: the exception of the signal's handler (KeyboardInterrupt) takes precedence."""

    kind = "interrupted"


class ChecksumError(Error):
    """The received bytes differ from the sent ones."""

    kind = "checksum"


class TooLargeError(Error, ValueError):
    """An argument exceeds a limit of the protocol."""

    kind = "too_large"


class BusyError(Error):
    """A bounded queue is full, blocks are out or in use, or the processes of a store do not answer."""

    kind = "busy"


class ShutdownError(Error):
    """This agent is shut down, or this store is closed."""

    kind = "shutdown"


class ForkedError(Error):
    """This process was forked from the one that started the agent."""

    kind = "forked"


class UnsupportedError(Error):
    """No allowed transport or protocol supports the operation."""

    kind = "unsupported"


class ProtocolError(Error):
    """The peer violated the protocol."""

    kind = "protocol"


class IoError(Error, OSError):
    """A call of the operating system failed."""

    kind = "io"


class InternalError(Error):
    """A defect in kvferry."""

    kind = "internal"


BY_KIND: Final[dict[str, type[Error]]] = {cls.kind: cls for cls in Error.__subclasses__()}
"""Every exception class by its kind. The native module reads it."""
