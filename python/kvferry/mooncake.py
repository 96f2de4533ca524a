"""Mooncake's transfer engine, done by kvferry: everything that ``mooncake.engine`` has in a build for host memory.

    from kvferry.mooncake import TransferEngine

or, with ``KVFERRY_SHIMS=mooncake`` in the environment, an unchanged ``from mooncake.engine import TransferEngine``.

Calls, return codes and tolerance are Mooncake's, and it speaks Mooncake's protocol with stock peers. What differs: a
call that failed has stopped copying when it returns; ids that are stale or made up are answered with -1; a call before
``initialize`` fails instead of crashing the process; ``TransferEngine.last_error()`` says why a call failed. The RPC
classes and ``SharedSegment`` are here for those who import them, and say that they are not available.

``initialize`` takes ``P2PHANDSHAKE`` or the address of Mooncake's HTTP metadata server, ``http://host:port/metadata``.
By a name that such a server knows, kvferry's engines reach each other, and stock engines reach kvferry's; to reach a
stock engine, name it by its address.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from kvferry._kvferry import InnerTransferEngine, TransferEngine, TransferNotify, TransferOpcode

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

SUPPORT_CUDA: Final = False
SUPPORT_EFA: Final = False
SUPPORT_HIP: Final = False
SUPPORT_INTRA_NVLINK: Final = False
SUPPORT_MNNVL: Final = False
SUPPORT_MUSA: Final = False

Read: Final = TransferOpcode.Read
Write: Final = TransferOpcode.Write


def _not_here(what: str) -> NoReturn:
    raise NotImplementedError(f"{what} is not part of kvferry's mooncake.engine; it moves memory, and nothing else")


class SharedSegment:
    """Memory shared between the processes of a host; not available here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _not_here("SharedSegment")

    @staticmethod
    def supported(mmap: bool = True, host_register: bool = False) -> bool:
        """Whether it is available: no."""
        return False

    @staticmethod
    def create(*args: Any, **kwargs: Any) -> NoReturn:
        """Says that it is not available."""
        _not_here("SharedSegment")


class RpcInterface:
    """Mooncake's RPC; not available here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _not_here("RpcInterface")


CoroRPCInterface = RpcInterface


class ReceivedData:
    """What Mooncake's RPC receives; never made here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _not_here("ReceivedData")


class ReceivedTensor:
    """What Mooncake's RPC receives; never made here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _not_here("ReceivedTensor")


def create_rpc_client(local_rank: int = 0, world_size: int = 1) -> NoReturn:
    """Says that it is not available."""
    _not_here("create_rpc_client")


def create_rpc_server(local_rank: int = 0, world_size: int = 1) -> NoReturn:
    """Says that it is not available."""
    _not_here("create_rpc_server")
