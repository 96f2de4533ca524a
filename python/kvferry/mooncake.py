"""Mooncake's transfer engine, implemented by kvferry: all of ``mooncake.engine``, for memory of the host and of GPUs.

    from kvferry.mooncake import TransferEngine

or, with ``KVFERRY_SHIMS=mooncake`` in the environment, an unchanged ``from mooncake.engine import TransferEngine``.

Calls, return codes and tolerance are Mooncake's, and it speaks Mooncake's protocol with stock peers. The differences: a
call that failed has stopped copying when it returns; stale and made-up ids are answered with -1; a call before
``initialize`` fails instead of crashing the process; ``TransferEngine.last_error()`` says why a call failed. The RPC
classes and ``SharedSegment`` can be imported, but raise ``NotImplementedError``.

``initialize`` takes ``P2PHANDSHAKE`` or the address of Mooncake's HTTP metadata server, ``http://host:port/metadata``.
With such a server, kvferry's engines reach each other by name, and stock engines reach kvferry's; to reach a stock
engine, give its address.

As in Mooncake, addresses are those of memory that the caller keeps valid: registered memory until it is unregistered,
local memory of a transfer until its outcome. They may be addresses of memory of a GPU, which is registered before a
transfer names it. The caller has waited for the work that uses the memory, or names by ``TransferEngine.set_after``
the work that transfers come after.
"""

from __future__ import annotations

import ctypes
import enum
import json
import operator
import os
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, overload

from kvferry._kvferry import MooncakeEngine

if TYPE_CHECKING:
    from kvferry._kvferry import _Sequence as _Numbers

__all__ = [
    "SUPPORT_CUDA",
    "SUPPORT_EFA",
    "SUPPORT_HIP",
    "SUPPORT_INTRA_NVLINK",
    "SUPPORT_MNNVL",
    "SUPPORT_MUSA",
    "CoroRPCInterface",
    "InnerTransferEngine",
    "Read",
    "ReceivedData",
    "ReceivedTensor",
    "RpcInterface",
    "SharedSegment",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "Write",
    "create_rpc_client",
    "create_rpc_server",
]

_Text: TypeAlias = str | bytes

SUPPORT_CUDA: Final = False
SUPPORT_EFA: Final = False
SUPPORT_HIP: Final = False
SUPPORT_INTRA_NVLINK: Final = False
SUPPORT_MNNVL: Final = False
SUPPORT_MUSA: Final = False


def _text(value: str | bytes) -> str:
    """Text as pybind11 takes it."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode()
    raise TypeError(f"expected str or bytes, not {type(value).__name__}")


def _number(value: int) -> int:
    """An address or a length: an integer of 64 bits without a sign."""
    number = operator.index(value)
    if not 0 <= number < 1 << 64:
        raise TypeError(f"incompatible function arguments: {number} does not fit 64 bits without a sign")
    return number


class TransferOpcode(enum.Enum):
    """The direction of a transfer: from the peer's memory, or to it."""

    Read = 0
    Write = 1

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)


# In the body of `TransferEngine` the name means its attribute.
_Opcode: TypeAlias = TransferOpcode
Read: Final = TransferOpcode.Read
Write: Final = TransferOpcode.Write


def _is_write(opcode: TransferOpcode) -> bool:
    if not isinstance(opcode, TransferOpcode):
        raise TypeError(f"expected a TransferOpcode, not {type(opcode).__name__}")
    return opcode is Write


class TransferNotify:
    """A notification that follows the data of a transfer."""

    @overload
    def __init__(self, name: None = None, msg: None = None) -> None: ...
    @overload
    def __init__(self, name: _Text, msg: _Text) -> None: ...
    def __init__(self, name: _Text | None = None, msg: _Text | None = None) -> None:
        if name is None and msg is None:
            name = msg = ""
        if name is None or msg is None:
            raise TypeError("TransferNotify takes no argument, or a name and a message")
        self.name = name
        self.msg = msg

    @property
    def name(self) -> str:
        return self._name

    @name.setter
    def name(self, name: _Text) -> None:
        self._name = _text(name)

    @property
    def msg(self) -> str:
        return self._msg

    @msg.setter
    def msg(self, msg: _Text) -> None:
        self._msg = _text(msg)


def _words(notify: TransferNotify | None) -> tuple[str, str] | None:
    if notify is None:
        return None
    if not isinstance(notify, TransferNotify):
        raise TypeError(f"expected a TransferNotify, not {type(notify).__name__}")
    return notify.name, notify.msg


class InnerTransferEngine:
    """What ``get_engine()`` returns. It keeps the engine alive and has no methods."""

    def __init__(self, engine: MooncakeEngine) -> None:
        self._engine = engine


class TransferEngine:
    """Mooncake's transfer engine.

    Calls return 0 or a negative code, transfers that run in the background an id or 0. Lists of addresses and lengths
    may be lists, tuples, or arrays of 64-bit integers. ``transport_hint`` and ``device_name`` have no effect. The CUDA
    driver tells whether memory is a GPU's; a ``location`` such as ``cuda:0`` loads it if the process has not.
    """

    TransferOpcode = _Opcode

    def __init__(self) -> None:
        self._engine = MooncakeEngine()

    def initialize(
        self,
        local_hostname: _Text,
        metadata_server: _Text,
        protocol: _Text | None,
        device_name: _Text | None,
        /,
    ) -> int:
        """Starts the engine, or replaces the running one. 0 or -1."""
        return self._engine.initialize(local_hostname, metadata_server, protocol or "")

    def initialize_ext(
        self,
        local_hostname: _Text,
        metadata_server: _Text,
        protocol: _Text | None,
        device_name: _Text | None,
        metadata_type: _Text,
        /,
    ) -> int:
        """`initialize` with the type of the metadata server apart from its address. 0 or -1."""
        server = _text(metadata_server)
        if server != "P2PHANDSHAKE" and "://" not in server:
            server = f"{_text(metadata_type)}://{server}"
        return self.initialize(local_hostname, server, protocol, device_name)

    def get_rpc_port(self) -> int:
        """The port that peers connect to; 0 before `initialize`."""
        return self._engine.rpc_port

    def register_memory(self, buffer_addr: int, capacity: int, location: _Text = "*") -> int:
        """Registers memory. 0; -1 for an empty range; -7 if it overlaps a registered one."""
        return self._engine.register([buffer_addr], [capacity], location)

    def unregister_memory(self, buffer_addr: int, /) -> int:
        """Unregisters the memory at an address. 0; -3 if none is registered there."""
        return self._engine.unregister([buffer_addr])

    def batch_register_memory(self, buffer_addresses: _Numbers, capacities: _Numbers, location: _Text = "*") -> int:
        """Registers many ranges, all or none. Codes as `register_memory`."""
        return self._engine.register(buffer_addresses, capacities, location)

    def batch_unregister_memory(self, buffer_addresses: _Numbers, /) -> int:
        """Unregisters many ranges, each even if another fails. 0, or the code of the first failure."""
        return self._engine.unregister(buffer_addresses)

    def transfer_sync_write(
        self, target_hostname: _Text, buffer: int, peer_buffer_address: int, length: int, transport_hint: _Text = ""
    ) -> int:
        """Writes and waits. 0 or -1."""
        return self._engine.transfer(True, target_hostname, [buffer], [peer_buffer_address], [length])

    def transfer_sync_read(
        self, target_hostname: _Text, buffer: int, peer_buffer_address: int, length: int, transport_hint: _Text = ""
    ) -> int:
        """Reads and waits. 0 or -1."""
        return self._engine.transfer(False, target_hostname, [buffer], [peer_buffer_address], [length])

    def transfer_sync(
        self,
        target_hostname: _Text,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: _Opcode,
        notify: TransferNotify | None = None,
        transport_hint: _Text = "",
    ) -> int:
        """Reads or writes and waits; the notification follows the data. 0 or -1."""
        lists = [buffer], [peer_buffer_address], [length]
        return self._engine.transfer(_is_write(opcode), target_hostname, *lists, _words(notify))

    def batch_transfer_sync_write(
        self,
        target_hostname: _Text,
        buffers: _Numbers,
        peer_buffer_addresses: _Numbers,
        lengths: _Numbers,
        transport_hint: _Text = "",
    ) -> int:
        """Writes many pieces and waits. 0, or -1 for the whole batch."""
        return self._engine.transfer(True, target_hostname, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_sync_read(
        self,
        target_hostname: _Text,
        buffers: _Numbers,
        peer_buffer_addresses: _Numbers,
        lengths: _Numbers,
        transport_hint: _Text = "",
    ) -> int:
        """Reads many pieces and waits. 0, or -1 for the whole batch."""
        return self._engine.transfer(False, target_hostname, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_sync(
        self,
        target_hostname: _Text,
        buffers: _Numbers,
        peer_buffer_addresses: _Numbers,
        lengths: _Numbers,
        opcode: _Opcode,
        notify: TransferNotify | None = None,
        transport_hint: _Text = "",
    ) -> int:
        """Reads or writes many pieces and waits; the notification follows the data. 0, or -1 for the whole batch."""
        lists = buffers, peer_buffer_addresses, lengths
        return self._engine.transfer(_is_write(opcode), target_hostname, *lists, _words(notify))

    def batch_transfer_async_write(
        self,
        target_hostname: _Text,
        buffers: _Numbers,
        peer_buffer_addresses: _Numbers,
        lengths: _Numbers,
        transport_hint: _Text = "",
    ) -> int:
        """Starts to write many pieces. An id, or 0."""
        return self._engine.submit(True, target_hostname, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_async_read(
        self,
        target_hostname: _Text,
        buffers: _Numbers,
        peer_buffer_addresses: _Numbers,
        lengths: _Numbers,
        transport_hint: _Text = "",
    ) -> int:
        """Starts to read many pieces. An id, or 0."""
        return self._engine.submit(False, target_hostname, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_async(
        self,
        target_hostname: _Text,
        buffers: _Numbers,
        peer_buffer_addresses: _Numbers,
        lengths: _Numbers,
        opcode: _Opcode,
        transport_hint: _Text = "",
    ) -> int:
        """Starts to read or write many pieces. An id, or 0."""
        return self._engine.submit(_is_write(opcode), target_hostname, buffers, peer_buffer_addresses, lengths)

    def get_batch_transfer_status(self, batch_ids: _Numbers, /) -> int:
        """Waits for all these ids, which are then used up. 0 or -1."""
        return self._engine.wait(batch_ids)

    def transfer_submit_write(
        self, target_hostname: _Text, buffer: int, peer_buffer_address: int, length: int, transport_hint: _Text = ""
    ) -> int:
        """Starts one write. An id, or 0."""
        return self._engine.submit(True, target_hostname, [buffer], [peer_buffer_address], [length])

    def transfer_check_status(self, batch_id: int, /) -> int:
        """1 done, 0 running, -1 failed, -2 timed out. Ids of done and failed transfers are used up."""
        return self._engine.check(batch_id)

    def allocate_managed_buffer(self, length: int, /) -> int:
        """The address of registered memory of at least ``length`` bytes, or 0."""
        return self._engine.allocate(length)

    def free_managed_buffer(self, buffer_addr: int, length: int, /) -> int:
        """Frees such memory. 0, or -1 if it was not allocated."""
        _number(length)
        return self._engine.free(buffer_addr)

    def write_bytes_to_buffer(self, dest_address: int, src: bytes | bytearray | str, length: int, /) -> int:
        """Copies the first ``length`` bytes of ``src`` to host memory. 0, or -1 if ``src`` has fewer."""
        address, length = _number(dest_address), _number(length)
        if not isinstance(src, (bytes, bytearray, str)):
            raise TypeError(f"expected bytes, bytearray or str, not {type(src).__name__}")
        data = src.encode() if isinstance(src, str) else bytes(src)
        if len(data) < length or (address == 0 and length > 0) or self._engine.is_gpu_memory(address):
            return -1
        ctypes.memmove(address, data, length)
        return 0

    def read_bytes_from_buffer(self, source_address: int, length: int, /) -> bytes:
        """The ``length`` bytes at an address of host memory."""
        address, length = _number(source_address), _number(length)
        if self._engine.is_gpu_memory(address):
            raise ValueError(f"{address:#x} is memory of a GPU; read it through a transfer")
        return (ctypes.c_char * length).from_address(address).raw if address and length else b""

    def get_first_buffer_address(self, segment_name: _Text, /) -> int:
        """The first registered address of a peer, or 0."""
        return self._engine.first_address(segment_name)

    def get_notifies(self) -> list[TransferNotify]:
        """Takes the notifications that have arrived."""
        return [TransferNotify(name, msg) for name, msg in self._engine.notifications()]

    def send_probe(self, peer_server_name: _Text) -> int:
        """Whether a peer answers. 0; -101 if its name is unknown; -102 if it does not answer."""
        return self._engine.probe(peer_server_name)

    def get_local_topology(self, device_name: _Text | None = None) -> str:
        """The NUMA nodes of this machine in Mooncake's JSON. It lists no network adapters."""
        try:
            names = os.listdir("/sys/devices/system/node")
        except OSError:
            names = []
        nodes = sorted(int(name[4:]) for name in names if name.startswith("node") and name[4:].isdecimal())
        return json.dumps({f"cpu:{node}": [[], []] for node in nodes or [0]})

    def get_engine(self) -> InnerTransferEngine | None:
        """An object that keeps the engine alive, or None before `initialize`."""
        return InnerTransferEngine(self._engine) if self._engine.is_running else None

    def get_engine_ptr(self) -> int:
        """A number that identifies the engine, 0 before `initialize`. It is not an address."""
        return self._engine.identity

    def warmup_efa_segment(self, segment_name: _Text) -> int:
        """Does nothing. 0."""
        _text(segment_name)
        return 0

    def set_after(self, after: Any) -> int:
        """Makes later transfers of memory of GPUs come after ``after``: "host" (the default: the caller has waited), a
        stream, an event, or a list of these, as `kvferry.Peer.write` takes it. A stream stands for the work that it has
        at each transfer's call. 0; -1 before `initialize`. Mooncake does not have this call."""
        return self._engine.set_after(after)

    def last_error(self) -> str:
        """Why the last call that failed did so; empty if none failed. Mooncake does not have this call."""
        return self._engine.last_error


def _not_here(what: str) -> NoReturn:
    raise NotImplementedError(f"{what} is not part of kvferry's mooncake.engine, which only moves memory")


class SharedSegment:
    """Memory shared between the processes of a host; not available here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _not_here("SharedSegment")

    @staticmethod
    def supported(mmap: bool = True, host_register: bool = False) -> bool:
        """False."""
        return False

    @staticmethod
    def create(*args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotImplementedError."""
        _not_here("SharedSegment")


class RpcInterface:
    """Mooncake's RPC; not available here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _not_here("RpcInterface")


CoroRPCInterface = RpcInterface


class ReceivedData:
    """What Mooncake's RPC receives; not available here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _not_here("ReceivedData")


class ReceivedTensor:
    """What Mooncake's RPC receives; not available here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _not_here("ReceivedTensor")


def create_rpc_client(local_rank: int = 0, world_size: int = 1) -> NoReturn:
    """Raises NotImplementedError."""
    _not_here("create_rpc_client")


def create_rpc_server(local_rank: int = 0, world_size: int = 1) -> NoReturn:
    """Raises NotImplementedError."""
    _not_here("create_rpc_server")
