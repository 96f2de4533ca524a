"""NIXL's exceptions, and which of them an error of kvferry is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import kvferry


class nixlNotPostedError(Exception):  # noqa: N801 - NIXL's names
    """The transfer was not posted."""


class nixlInvalidParamError(Exception):  # noqa: N801
    """An argument is invalid."""


class nixlBackendError(Exception):  # noqa: N801
    """Moving or registering failed."""


class nixlNotFoundError(Exception):  # noqa: N801
    """The memory, the agent or the backend is not known."""


class nixlMismatchError(Exception):  # noqa: N801
    """The metadata is not an agent's."""


class nixlNotAllowedError(Exception):  # noqa: N801
    """An agent of that name is known and lives."""


class nixlRepostActiveError(Exception):  # noqa: N801
    """The transfer still runs."""


class nixlUnknownError(Exception):  # noqa: N801
    """An error without a class of its own."""


class nixlNotSupportedError(Exception):  # noqa: N801
    """kvferry does not have this."""


class nixlRemoteDisconnectError(Exception):  # noqa: N801
    """The remote agent is gone."""


class nixlCancelledError(Exception):  # noqa: N801
    """The transfer was cancelled."""


class nixlNoTelemetryError(Exception):  # noqa: N801
    """The agent was made without telemetry."""


# After these, the remote agent has to be added again.
GONE: Final = (
    kvferry.PeerResetError,
    kvferry.PeerSilentError,
    kvferry.PeerClosedError,
    kvferry.UnreachableError,
    kvferry.StaleIncarnationError,
)
_CLASSES: Final[tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], type[Exception]], ...]] = (
    (GONE, nixlRemoteDisconnectError),
    (kvferry.CancelledError, nixlCancelledError),
    ((kvferry.NotRegisteredError, kvferry.RevokedError, kvferry.OutOfBoundsError), nixlNotFoundError),
    ((kvferry.InvalidArgumentError, kvferry.TooLargeError), nixlInvalidParamError),
    (kvferry.UnsupportedError, nixlNotSupportedError),
)


def translated(error: Exception) -> Exception:
    """NIXL's exception for an error of kvferry, with the same text."""
    for ours, theirs in _CLASSES:
        if isinstance(error, ours):
            return theirs(str(error))
    return nixlBackendError(str(error))


@contextlib.contextmanager
def as_nixl() -> Iterator[None]:
    """Inside the block, errors of kvferry and of the system are raised as NIXL's."""
    try:
        yield
    except (kvferry.Error, OSError) as error:
        raise translated(error) from error
