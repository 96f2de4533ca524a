"""The metadata that agents exchange: who and where an agent is, and its registered memory.

A magic with the version, the length of a JSON header, the header, then one fixed record per region.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import Final

from kvferry.nixl._errors import nixlMismatchError

MAGIC: Final = b"kvferry-nixl\x01"
_LENGTH: Final = struct.Struct("<I")
# Address, length, device, and the region as kvferry's core names it.
_RECORD: Final = struct.Struct("<QQQB")
TOKEN_MAX: Final = 255
HEADER_MAX: Final = 64 << 10


@dataclass(frozen=True)
class RemoteMemory:
    """A region of the agent that the metadata is about."""

    addr: int
    length: int
    device: int
    token: bytes


@dataclass
class Metadata:
    """`address` is None in metadata without connection information."""

    name: str
    incarnation: str
    address: str | None
    regions: list[RemoteMemory] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        header = json.dumps({"name": self.name, "incarnation": self.incarnation, "address": self.address}).encode()
        records = b"".join(
            _RECORD.pack(region.addr, region.length, region.device, len(region.token)) + region.token
            for region in self.regions
        )
        return MAGIC + _LENGTH.pack(len(header)) + header + records

    @staticmethod
    def from_bytes(blob: bytes) -> Metadata:
        """nixlMismatchError if these are not the bytes of an agent's metadata."""
        try:
            return _read(memoryview(blob))
        except nixlMismatchError:
            raise
        except (TypeError, ValueError, KeyError, struct.error, RecursionError) as error:
            raise nixlMismatchError(f"malformed metadata: {error}") from error


def _read(blob: memoryview) -> Metadata:
    if bytes(blob[: len(MAGIC)]) != MAGIC:
        raise nixlMismatchError(
            "not the metadata of a kvferry agent of this version; with KVFERRY_SHIMS=nixl, both ends need kvferry"
        )
    at = len(MAGIC)
    (length,) = _LENGTH.unpack_from(blob, at)
    at += _LENGTH.size
    if length > HEADER_MAX or at + length > len(blob):
        raise nixlMismatchError("truncated metadata")
    header = json.loads(bytes(blob[at : at + length]))
    at += length
    name, incarnation, address = header["name"], header["incarnation"], header["address"]
    if not (isinstance(name, str) and name and isinstance(incarnation, str)):
        raise nixlMismatchError("malformed metadata: no name")
    # JSON has names that are not UTF-8.
    name.encode()
    if address is not None and not isinstance(address, str):
        raise nixlMismatchError("malformed metadata: the address is no text")
    regions = []
    while at < len(blob):
        addr, size, device, token = _RECORD.unpack_from(blob, at)
        at += _RECORD.size
        if at + token > len(blob) or addr + size >= 1 << 64:
            raise nixlMismatchError("malformed metadata: a region")
        regions.append(RemoteMemory(addr, size, device, bytes(blob[at : at + token])))
        at += token
    return Metadata(name, incarnation, address, regions)
