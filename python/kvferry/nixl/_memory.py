"""Registered memory and files of an agent, and of remote agents; finding the region of each descriptor."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

import kvferry
from kvferry.nixl._bindings import nixl_mem_t
from kvferry.nixl._errors import nixlBackendError, nixlInvalidParamError, nixlNotFoundError
from kvferry.nixl._metadata import Metadata, RemoteMemory

Array: TypeAlias = np.ndarray[Any, Any]

# How long an agent may take to say that it still lives.
_ANSWER_S: Final = 1.0

# A file by its path, in a registration's `meta`: the access, further words, the path.
_BY_PATH: Final = re.compile(r"(ro|rw)((?:,\w+)*):(.+)", re.DOTALL)


@dataclass(eq=False)
class Area:
    """A registered range: memory, or a part of a file. `uses`: registrations of it.

    `device` is a file's descriptor, `of` the file that it was, and `asked` the length that was given, 0 for all.
    """

    addr: int
    length: int
    device: int
    remote: kvferry.RemoteRegion
    region: kvferry.Region | None = None
    file: kvferry.FileRegion | None = None
    uses: int = 1
    asked: int = 0
    of: object = None

    @property
    def end(self) -> int:
        return self.addr + self.length

    @property
    def is_gpu(self) -> bool:
        """Whether it is memory of a GPU, which transfers name by region: its address is one of its GPU."""
        return self.file is None and self.remote.addr == 0


class Areas:
    """Areas that do not overlap, and the one that each descriptor lies in. It does not change."""

    def __init__(self, areas: Iterable[Area]) -> None:
        # Files with equal offsets differ in the device, memory has one address space.
        self.list = sorted(areas, key=lambda area: (area.device if area.file else 0, area.addr))
        self._starts = np.array([area.addr for area in self.list], dtype=np.uint64)
        self._ends = np.array([area.end for area in self.list], dtype=np.uint64)

    def find(self, addrs: Array, lengths: Array, what: str) -> Array:
        """The position in `list` of the area of each range; nixlNotFoundError if one lies in none."""
        at = np.searchsorted(self._starts, addrs, side="right") - 1
        ends = addrs + lengths
        if len(self.list):
            missing = (at < 0) | (ends > self._ends[at]) | (ends < addrs)
        else:
            missing = np.ones(len(addrs), dtype=bool)
        if missing.any():
            first = int(np.flatnonzero(missing)[0])
            raise nixlNotFoundError(
                f"descriptor {first}, {int(lengths[first])} bytes at {int(addrs[first]):#x}, does not lie in one "
                f"registered region of {what}"
            )
        return at.astype(np.int32)

    def without(self, others: Areas) -> list[Area]:
        """Those that overlap none of the others."""
        if not self.list or not others.list:
            return self.list
        before = np.searchsorted(others._starts, self._ends, side="left") - 1
        overlaps = (before >= 0) & (others._ends[before] > self._starts)
        return [area for area, gone in zip(self.list, overlaps.tolist(), strict=True) if not gone]


class Local:
    """What an agent has registered. The caller holds the agent's lock."""

    def __init__(self) -> None:
        self.memory: dict[tuple[int, int], Area] = {}
        # By descriptor.
        self.files: dict[int, list[Area]] = {}
        self._areas: Areas | None = None

    @property
    def areas(self) -> Areas:
        if self._areas is None:
            self._areas = Areas(self.memory.values())
        return self._areas

    def is_live(self, area: Area) -> bool:
        if area.file is not None:
            return area in self.files.get(area.device, ())
        return self.memory.get((area.addr, area.length)) is area

    def find(self, kind: nixl_mem_t, addr: int, length: int, device: int) -> Area:
        """A registered area, by what it was registered with."""
        is_file = kind is nixl_mem_t.FILE_SEG
        found = self._file(addr, length, device) if is_file else self.memory.get((addr, length))
        if found is None:
            raise nixlNotFoundError(f"nothing is registered as {length} bytes at {addr:#x}, device {device}")
        return found

    def add_memory(self, agent: kvferry.Agent, kind: nixl_mem_t, addr: int, length: int, device: int) -> None:
        if addr == 0 or length == 0:
            raise nixlInvalidParamError(f"can't register {length} bytes at {addr:#x}")
        known = self.memory.get((addr, length))
        # One that could not be deregistered to the end is known, but is not registered.
        if known is not None and known.region is not None and known.region.is_registered:
            known.uses += 1
            return
        try:
            region = _registered(agent, kind, addr, length)
        except (kvferry.UnsupportedError, kvferry.InvalidArgumentError) as error:
            raise nixlBackendError(str(error)) from error
        except kvferry.OverlapError as error:
            raise nixlBackendError(
                f"{error}. kvferry registers a range twice if both are equal, not if they overlap"
            ) from error
        area = Area(addr, length, device, region.remote(), region=region)
        # kvferry finds overlaps of memory of the host only.
        if known is None and area.is_gpu and Areas([area]).without(self.areas) == []:
            agent.unregister(region)
            raise nixlBackendError(
                f"{length} bytes at {addr:#x} overlap a registered range of a GPU; a range can be registered twice if "
                "both are equal"
            )
        self.memory[addr, length] = area
        self._areas = None

    def _file(self, offset: int, length: int, device: int) -> Area | None:
        ranges = self.files.get(device, ())
        return next((area for area in ranges if (area.addr, area.asked) == (offset, length)), None)

    def add_file(self, agent: kvferry.Agent, offset: int, length: int, device: int, meta: str) -> None:
        by_path = _BY_PATH.fullmatch(meta)
        of = (by_path[1], by_path[3]) if by_path else _file_of(device)
        ranges = self.files.get(device, [])
        if ranges and ranges[0].of != of:
            raise nixlBackendError(
                f"another file is registered as device {device}; deregister it before its descriptor is closed"
            )
        known = self._file(offset, length, device)
        if known is not None:
            known.uses += 1
            return
        file = _by_path(agent, by_path, offset, length) if by_path else _by_descriptor(agent, device, offset, length)
        area = Area(offset, file.nbytes, device, file.remote(), file=file, asked=length, of=of)
        self.files.setdefault(device, []).append(area)

    def take(self, areas: list[Area]) -> list[Area]:
        """Ends a registration of each area. Returns those without another, which are no longer known."""
        ended = []
        for area in areas:
            area.uses -= 1
            if area.uses <= 0 and area not in ended:
                ended.append(area)
                if area.file is None:
                    del self.memory[area.addr, area.length]
                else:
                    self.files[area.device].remove(area)
                    if not self.files[area.device]:
                        del self.files[area.device]
        self._areas = None
        return ended

    def put_back(self, ended: list[Area]) -> None:
        for area in ended:
            area.uses = 1
            if area.file is not None:
                self.files.setdefault(area.device, []).append(area)
            else:
                self.memory[area.addr, area.length] = area
        self._areas = None


def _registered(agent: kvferry.Agent, kind: nixl_mem_t, addr: int, length: int) -> kvferry.Region:
    """Memory of the host, or of a GPU. Engines on the CPU call theirs VRAM, too, and need no driver."""
    try:
        return agent.register((addr, length))
    except (kvferry.UnsupportedError, kvferry.InvalidArgumentError) as error:
        if kind is not nixl_mem_t.VRAM_SEG:
            raise
        no_host_memory = error
    try:
        return agent.register((addr, length), device="cuda")
    except kvferry.InvalidArgumentError as error:
        raise nixlBackendError(f"{no_host_memory}; and no memory of a GPU: {error}") from error


def close(agent: kvferry.Agent, area: Area) -> None:
    """Ends what `Local.take` returned. Waits for peers that still write."""
    if area.file is not None:
        area.file.close()
    else:
        assert area.region is not None
        agent.unregister(area.region)


def _file_of(fd: int) -> tuple[int, int, int]:
    """What tells a file from another one that has its descriptor later."""
    found = os.fstat(fd)
    return found.st_dev, found.st_ino, fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_DIRECT)


def _by_descriptor(agent: kvferry.Agent, fd: int, offset: int, length: int) -> kvferry.FileRegion:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    writable = flags & os.O_ACCMODE == os.O_RDWR
    # Past the page cache only if the caller has opened it so.
    direct: Any = "auto" if flags & os.O_DIRECT else "off"
    nbytes = length or os.fstat(fd).st_size - offset
    return agent.register_file(fd, "rw" if writable else "r", offset=offset, nbytes=nbytes, direct=direct)


def _by_path(agent: kvferry.Agent, meta: re.Match[str], offset: int, length: int) -> kvferry.FileRegion:
    access, words, path = meta.groups()
    asked = set(words.split(",")[1:])
    unknown = asked - {"direct", "create"}
    if unknown:
        raise nixlInvalidParamError(f"{meta.string!r}: kvferry does not know {', '.join(sorted(unknown))}")
    nbytes = length or os.stat(path).st_size - offset
    return agent.open_file(
        path,
        "rw" if access == "rw" else "r",
        create="create" in asked and not os.path.exists(path),
        offset=offset,
        nbytes=nbytes,
        direct="auto" if "direct" in asked else "off",
    )


class Remote:
    """A remote agent, as its metadata says. `lost`: a transfer found that it is gone."""

    def __init__(self, name: str, incarnation: str) -> None:
        self.name = name
        self.incarnation = incarnation
        self.peer: kvferry.Peer | None = None
        self.lost = False
        self.areas = Areas([])
        # Notifications whose outcome is not known yet.
        self.notifying: list[kvferry.Transfer] = []

    def update(self, agent: kvferry.Agent, metadata: Metadata) -> None:
        """Adds regions; a new one replaces those that it overlaps, which the agent has deregistered."""
        if metadata.regions:
            added = Areas(_remote_area(region) for region in metadata.regions)
            self.areas = Areas([*self.areas.without(added), *added.list])
        if metadata.address is not None:
            self.peer = agent.peer(metadata.address)
            self.lost = False

    def answers(self) -> bool:
        """True if this incarnation of the agent still lives. Asks it, for twice `_ANSWER_S` at most."""
        if self.lost or self.peer is None:
            return False
        try:
            self.peer.probe(timeout=_ANSWER_S)
            return self.peer.connect(timeout=_ANSWER_S).incarnation == self.incarnation
        except kvferry.Error:
            return False


def _remote_area(region: RemoteMemory) -> Area:
    return Area(region.addr, region.length, region.device, kvferry.RemoteRegion.from_bytes(region.token))
