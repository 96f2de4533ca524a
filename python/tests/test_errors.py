"""Exceptions: one class per kind, and their builtin base classes."""

from __future__ import annotations

import pickle
import re

import kvferry
import pytest
from kvferry._errors import BY_KIND

# The kinds of the core, which has the same list in `ErrorKind::ALL`.
KINDS = [
    "invalid_argument",
    "overlap",
    "not_registered",
    "out_of_bounds",
    "access_denied",
    "revoked",
    "quarantined",
    "unreachable",
    "peer_reset",
    "peer_silent",
    "peer_closed",
    "auth_required",
    "auth_unsupported",
    "auth_failed",
    "version_mismatch",
    "stale_incarnation",
    "deadline",
    "cancelled",
    "interrupted",
    "checksum",
    "too_large",
    "busy",
    "shutdown",
    "forked",
    "unsupported",
    "protocol",
    "io",
    "internal",
]


def test_every_kind_has_a_class_of_its_name() -> None:
    assert sorted(BY_KIND) == sorted(KINDS)
    for kind, cls in BY_KIND.items():
        assert cls.kind == kind
        assert cls.__name__ == "".join(word.capitalize() for word in kind.split("_")) + "Error"
        assert getattr(kvferry, cls.__name__) is cls
        assert issubclass(cls, kvferry.Error)
        assert cls.__doc__


@pytest.mark.parametrize("kind", KINDS)
def test_pickling_an_error_keeps_its_attributes(kind: str) -> None:
    error = BY_KIND[kind]("what happened", quiesced=False, context={"peer": "a:1"})
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is BY_KIND[kind]
    assert (str(again), again.quiesced, again.context) == ("what happened", False, {"peer": "a:1"})


def test_errors_are_subclasses_of_the_matching_builtins() -> None:
    for cls, family in (
        (kvferry.DeadlineError, TimeoutError),
        (kvferry.UnreachableError, ConnectionError),
        (kvferry.PeerResetError, ConnectionError),
        (kvferry.PeerSilentError, ConnectionError),
        (kvferry.PeerClosedError, ConnectionError),
        (kvferry.AccessDeniedError, PermissionError),
        (kvferry.AuthFailedError, PermissionError),
        (kvferry.InvalidArgumentError, ValueError),
        (kvferry.OutOfBoundsError, IndexError),
        (kvferry.IoError, OSError),
    ):
        assert issubclass(cls, family)


def test_an_error_message_is_one_line_with_its_context(agent: kvferry.Agent) -> None:
    with pytest.raises(kvferry.UnreachableError) as caught:
        agent.peer("127.0.0.1:1").connect()
    error = caught.value
    assert "\n" not in str(error)
    assert error.context["peer"] == "127.0.0.1:1"
    assert re.search(r"127\.0\.0\.1:1", str(error))
    assert error.quiesced is None
    assert error.kind == "unreachable"
