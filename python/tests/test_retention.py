"""The block manager's retention configuration."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import kvferry
import pytest


def config() -> kvferry.RetentionConfig:
    return kvferry.RetentionConfig(
        [(128, None, 50), (0, 128, 90, 60_000)],
        decode_priority=10,
        decode_duration_ms=2**64 - 1,
        transfer_mode="posix_debug_fallback",
        directory=Path("kv") / "blöcke",
    )


def test_a_configuration_has_what_it_was_given_in_the_order_of_its_tokens() -> None:
    given = config()
    assert given.ranges == [(0, 128, 90, 60_000), (128, None, 50, None)]
    assert (given.decode_priority, given.decode_duration_ms) == (10, 2**64 - 1)
    assert (given.transfer_mode, given.directory) == ("posix_debug_fallback", "kv/blöcke")
    assert given.warning is None
    assert "2 ranges" in repr(given)


def test_the_default_is_priority_35_for_ever_in_host_memory() -> None:
    default = kvferry.RetentionConfig()
    assert default.ranges == []
    assert (default.decode_priority, default.decode_duration_ms) == (35, None)
    assert (default.transfer_mode, default.directory, default.warning) == ("dram", None, None)
    assert default == kvferry.RetentionConfig(()) != config()


def test_its_bytes_have_a_version_and_are_the_same_configuration() -> None:
    given = config()
    data = given.to_bytes()
    assert data[:6] == b"KVRC\x01\x00"
    assert kvferry.RetentionConfig.from_bytes(data) == given
    assert kvferry.RetentionConfig.from_bytes(data).to_bytes() == data
    assert pickle.loads(pickle.dumps(given)) == given
    assert len({given, config(), kvferry.RetentionConfig()}) == 2


def test_the_bytes_are_those_of_earlier_versions() -> None:
    short = kvferry.RetentionConfig([(0, 16, 80, 1000)], transfer_mode="gds", directory="d")
    golden = "4b5652430100 01 2300 0000000000000000 0100 64 0100 00000000 01 10000000 50 01 e803000000000000"
    assert short.to_bytes().hex() == golden.replace(" ", "")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"ranges": [(5, 5, 1)]}, "token range 5..5: its end must be after its start"),
        ({"ranges": [(9, 5, 1)]}, "token range 9..5: its end must be after its start"),
        ({"ranges": [(0, 64, 1), (60, 80, 1)]}, "token ranges 0..64 and 60..80 overlap"),
        ({"ranges": [(0, None, 1), (30, 50, 1)]}, "token range 0.. has no end, but 30..50 is after it"),
        ({"ranges": [(0, None, 101)]}, "retention priority 101: it must be between 0 and 100"),
        ({"ranges": [(0, None, 300)]}, "retention priority 300: it must be between 0 and 100"),
        ({"ranges": [(0, None, -1)]}, "retention priority -1: it must be between 0 and 100"),
        ({"ranges": [(-1, None, 1)]}, "a token range's start is -1: it must be 0 to 4294967295"),
        ({"ranges": [(0, 2**32, 1)]}, "a token range's end is 4294967296"),
        ({"ranges": [(at, at + 1, 1) for at in range(1025)]}, "1025 token ranges: at most 1024 are supported"),
        ({"decode_priority": 101}, "retention priority 101"),
        ({"transfer_mode": "nvme"}, 'transfer_mode must be "dram", "gds" or "posix_debug_fallback", not "nvme"'),
        ({"directory": "a\0b"}, "the directory's path contains a zero byte"),
        ({"directory": "x" * 4097}, "the directory's path has 4097 bytes: at most 4096 are supported"),
    ],
)
def test_what_can_not_be_meant_is_an_error_that_names_it(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(kvferry.InvalidArgumentError, match=re.escape(what)):
        kvferry.RetentionConfig(**arguments)


def test_bytes_that_are_no_configuration_are_refused() -> None:
    data = config().to_bytes()
    newer = data[:4] + b"\x02\x00" + data[6:]
    for wrong, what in [
        (b"", "the bytes do not begin with KVRC"),
        (newer, "version 2, this kvferry reads up to 1: upgrade it"),
        (data + b"\0", "1 bytes after its end"),
        *((data[:end], "truncated|do not begin") for end in range(len(data))),
    ]:
        with pytest.raises(kvferry.InvalidArgumentError, match=what):
            kvferry.RetentionConfig.from_bytes(wrong)


def test_a_file_mode_without_a_directory_says_that_it_is_host_memory() -> None:
    for directory in [None, ""]:
        missing = kvferry.RetentionConfig(transfer_mode="gds", directory=directory)
        assert missing.transfer_mode == "gds"
        assert missing.directory is None
        assert missing.warning is not None
        assert "offloaded to host memory" in missing.warning
