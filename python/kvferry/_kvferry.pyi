"""The native module. Import its classes from `kvferry` and `kvferry.mooncake`."""

from collections.abc import Callable, Generator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import GenericAlias, TracebackType
from typing import (
    Any,
    Final,
    Generic,
    Literal,
    Protocol,
    SupportsIndex,
    TypeAlias,
    TypedDict,
    TypeVar,
    final,
    overload,
)

from typing_extensions import Buffer

__all__ = [
    "READS_INTS_DIRECTLY",
    "Agent",
    "Allocation",
    "Batch",
    "BlockManager",
    "Blocks",
    "Exchange",
    "FileRegion",
    "Files",
    "MooncakeEngine",
    "Notification",
    "Peer",
    "PeerSummary",
    "Pending",
    "Pin",
    "Put",
    "Region",
    "RemoteRegion",
    "RetentionConfig",
    "SchedulerHalf",
    "Space",
    "Store",
    "Transfer",
    "TransferStats",
    "Watch",
    "WorkerHalf",
    "__version__",
    "counted_reasons",
    "log_to_stderr",
    "prompt_id",
]

__version__: Final[str]
# Whether ints in lists are read without a call of the interpreter for each: so in the versions of CPython that are known.
READS_INTS_DIRECTLY: Final[bool]

_Access: TypeAlias = Literal["rw", "r", "w", "none"]
# Past the page cache: where the file system can, never, or else opening fails.
_Direct: TypeAlias = Literal["auto", "off", "require"]

class _Array(Protocol):
    """A numpy array."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...

class _Tensor(Protocol):
    """A torch tensor in host memory, or on CUDA."""

    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...
    def numel(self) -> int: ...
    def is_contiguous(self) -> bool: ...

class _CudaArray(Protocol):
    """Memory of a GPU, by the CUDA array interface: CuPy, Numba. Not read-only, as JAX's is."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

class _DLPack(Protocol):
    """Memory that its owner exports by DLPack."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, int]: ...

class _TorchStream(Protocol):
    @property
    def cuda_stream(self) -> int: ...

class _TorchEvent(Protocol):
    @property
    def cuda_event(self) -> int: ...

class _Stream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...

class _CupyStream(Protocol):
    @property
    def ptr(self) -> int: ...

# What a transfer of memory of a GPU comes after: the work that a stream has, or an event stands for; "host" if the caller has
# waited. An integer is the handle of a stream.
_Order: TypeAlias = _TorchStream | _TorchEvent | _Stream | _CupyStream | int | Literal["host"]
_After: TypeAlias = _Order | list[_Order] | tuple[_Order, ...]
# "cuda", "cuda:1", "cpu", a torch.device, the number of a GPU in this process, its UUID or its address on the PCI bus.
_Device: TypeAlias = str | int | object
# Integers of 64 bits without a sign.
_Sequence: TypeAlias = Sequence[SupportsIndex] | _Array
_Numbers: TypeAlias = _Sequence | SupportsIndex
_Notice: TypeAlias = Notification | tuple[str, bytes | str]
# An object with writable memory, or an address and a length in bytes. Before Python 3.12, NumPy's stubs do not say that
# its arrays are buffers.
_Buffer: TypeAlias = Buffer | _Array | _Tensor | _CudaArray | _DLPack | tuple[int, int]

@final
class Agent:
    """A kvferry endpoint in this process: owns regions, sessions and transfers.

    Settings that are not given come from the environment (KVFERRY_LISTEN, KVFERRY_SECRET, …), then from the defaults.
    `silence` and `timeout` are in seconds. The agent ends with `shutdown()`, with the `with` block, or with the last
    object that refers to it.
    """

    def __new__(
        cls,
        name: str | None = None,
        *,
        listen: str | None = None,
        advertise: str | None = None,
        secret: bytes | str | None = None,
        transports: str | Sequence[str] | None = None,
        checksum: Literal["auto", "on", "off"] | bool | None = None,
        silence: float | None = None,
        timeout: float | None = None,
        streams_per_peer: int | None = None,
        io_threads: int | None = None,
        mooncake: bool | None = None,
        ptracer_any: bool | None = None,
        file_engine: Literal["auto", "uring", "posix"] | None = None,
    ) -> Agent: ...
    @property
    def name(self) -> str: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def local_address(self) -> tuple[str, int]: ...
    @property
    def address(self) -> str: ...
    @property
    def config(self) -> dict[str, Any]: ...
    def set_after(self, after: _After | None) -> None: ...
    def register(
        self, buffer: _Buffer, access: _Access = "rw", *, name: str | None = None, device: _Device | None = None
    ) -> Region: ...
    def register_batch(
        self, buffers: Sequence[_Buffer], access: _Access = "rw", *, device: _Device | None = None
    ) -> list[Region]: ...
    def allocate(self, nbytes: int, access: _Access = "rw", *, name: str | None = None) -> Region: ...
    def unregister(self, region: Region) -> None: ...
    def unregister_batch(self, regions: Sequence[Region]) -> None: ...
    def region(self, name: str) -> Region | None: ...
    def regions(self) -> list[Region]: ...
    def peer(self, address: str) -> Peer: ...
    def open_file(
        self,
        path: str | PathLike[str],
        access: Literal["r", "rw"] = "r",
        *,
        create: bool = False,
        offset: int = 0,
        nbytes: int | None = None,
        direct: _Direct = "auto",
    ) -> FileRegion: ...
    def register_file(
        self,
        fd: int,
        access: Literal["r", "rw"] = "r",
        *,
        offset: int = 0,
        nbytes: int | None = None,
        direct: _Direct = "auto",
    ) -> FileRegion: ...
    @property
    def files(self) -> Files: ...
    def notifications(self) -> list[Notification]: ...
    def wait_notification(self, timeout: float | None = None) -> Notification | None: ...
    def notification_fd(self) -> int: ...
    def stats(self) -> dict[str, int]:
        """Counters and gauges of this agent by name, and of each GPU with registered memory, for all agents of the process:
        ``gpu0_bytes_out`` and so on.
        """

    def shutdown(self) -> None: ...
    def __enter__(self) -> Agent: ...
    def __exit__(self, *_exception: type[BaseException] | BaseException | TracebackType | None) -> None: ...

@final
class Region:
    """Registered memory: this agent may read and write it, peers what its access allows."""

    @property
    def id(self) -> int: ...
    @property
    def name(self) -> str | None: ...
    @property
    def addr(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def access(self) -> _Access: ...
    @property
    def is_registered(self) -> bool: ...
    @property
    def is_quarantined(self) -> bool: ...
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    def remote(self) -> RemoteRegion: ...
    def memory(self) -> memoryview: ...
    def write_at(self, offset: int, data: bytes | bytearray) -> None: ...
    def read_at(self, offset: int, nbytes: int) -> bytes: ...
    def __len__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class RemoteRegion:
    """The description of a peer's region."""

    @staticmethod
    def from_bytes(data: bytes) -> RemoteRegion: ...
    def to_bytes(self) -> bytes: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def id(self) -> int: ...
    @property
    def addr(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def access(self) -> _Access: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Batch:
    """The descriptors of one transfer: pieces of local memory, each with its place at the peer. Reusable."""

    def __new__(cls) -> Batch: ...
    def push(self, local: Region, local_offset: int, remote: RemoteRegion, remote_offset: int, nbytes: int) -> None: ...
    def push_to_address(self, local: Region, local_offset: int, remote_addr: int, nbytes: int) -> None: ...
    def extend_regions(
        self, local: Region, local_offsets: _Numbers, remote: RemoteRegion, remote_offsets: _Numbers, nbytes: _Numbers
    ) -> None: ...
    def extend(self, local_addrs: _Numbers, remote_addrs: _Numbers, nbytes: _Numbers) -> None: ...
    def clear(self) -> None: ...
    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...

@final
class Peer:
    """Another agent, by its address."""

    @property
    def address(self) -> str: ...
    @property
    def transport(self) -> str | None: ...
    def connect(self, timeout: float | None = None) -> PeerSummary: ...
    def regions(self, timeout: float | None = None) -> list[RemoteRegion]: ...
    def region(self, name: str, timeout: float | None = None) -> RemoteRegion: ...
    def probe(self, timeout: float | None = None) -> float: ...
    @overload
    def write(
        self,
        what: Batch,
        remote_addrs: None = None,
        nbytes: None = None,
        *,
        timeout: float | None = None,
        notify: _Notice | None = None,
        streams: int | None = None,
        after: _After | None = None,
    ) -> TransferStats: ...
    @overload
    def write(
        self,
        what: _Numbers,
        remote_addrs: _Numbers,
        nbytes: _Numbers,
        *,
        timeout: float | None = None,
        notify: _Notice | None = None,
        streams: int | None = None,
        after: _After | None = None,
    ) -> TransferStats: ...
    @overload
    def read(
        self,
        what: Batch,
        remote_addrs: None = None,
        nbytes: None = None,
        *,
        timeout: float | None = None,
        notify: _Notice | None = None,
        streams: int | None = None,
        after: _After | None = None,
    ) -> TransferStats: ...
    @overload
    def read(
        self,
        what: _Numbers,
        remote_addrs: _Numbers,
        nbytes: _Numbers,
        *,
        timeout: float | None = None,
        notify: _Notice | None = None,
        streams: int | None = None,
        after: _After | None = None,
    ) -> TransferStats: ...
    @overload
    def write_async(
        self,
        what: Batch,
        remote_addrs: None = None,
        nbytes: None = None,
        *,
        timeout: float | None = None,
        notify: _Notice | None = None,
        streams: int | None = None,
        after: _After | None = None,
    ) -> Transfer: ...
    @overload
    def write_async(
        self,
        what: _Numbers,
        remote_addrs: _Numbers,
        nbytes: _Numbers,
        *,
        timeout: float | None = None,
        notify: _Notice | None = None,
        streams: int | None = None,
        after: _After | None = None,
    ) -> Transfer: ...
    @overload
    def read_async(
        self,
        what: Batch,
        remote_addrs: None = None,
        nbytes: None = None,
        *,
        timeout: float | None = None,
        notify: _Notice | None = None,
        streams: int | None = None,
        after: _After | None = None,
    ) -> Transfer: ...
    @overload
    def read_async(
        self,
        what: _Numbers,
        remote_addrs: _Numbers,
        nbytes: _Numbers,
        *,
        timeout: float | None = None,
        notify: _Notice | None = None,
        streams: int | None = None,
        after: _After | None = None,
    ) -> Transfer: ...
    def notify(self, notification: _Notice, *, timeout: float | None = None) -> None: ...
    def disconnect(self) -> None: ...

@final
class Transfer:
    """A transfer in the background. It has exactly one outcome. Dropping the object does not cancel it."""

    def done(self) -> bool: ...
    def poll(self) -> TransferStats | None: ...
    def wait(self, timeout: float | None = None) -> TransferStats | None: ...
    def cancel(self) -> None: ...
    def is_quiet(self) -> bool: ...
    def fileno(self) -> int: ...
    def __await__(self) -> Generator[Any, None, TransferStats]: ...

@final
class TransferStats:
    """The result of a transfer."""

    @property
    def nbytes(self) -> int: ...
    @property
    def descriptors(self) -> int: ...
    @property
    def streams(self) -> int: ...
    @property
    def transport(self) -> str | None: ...

@final
class FileRegion:
    """A range of a file of this host."""

    @property
    def id(self) -> int: ...
    @property
    def path(self) -> Path: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def is_direct(self) -> bool: ...
    def remote(self) -> RemoteRegion: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...

@final
class Files:
    """The files of an agent."""

    @property
    def engine(self) -> str | None: ...
    def write(self, batch: Batch, *, timeout: float | None = None, after: _After | None = None) -> TransferStats: ...
    def read(self, batch: Batch, *, timeout: float | None = None, after: _After | None = None) -> TransferStats: ...
    def write_async(self, batch: Batch, *, timeout: float | None = None, after: _After | None = None) -> Transfer: ...
    def read_async(self, batch: Batch, *, timeout: float | None = None, after: _After | None = None) -> Transfer: ...

# Start, end or None for the end of the prompt, priority, duration in milliseconds.
_TokenRange: TypeAlias = tuple[int, int | None, int] | tuple[int, int | None, int, int | None]

@final
class RetentionConfig:
    """How long the block manager keeps a request's blocks, and how it offloads them.

    `ranges`: (start, end, priority) or (start, end, priority, duration_ms) of the prompt's tokens. They may be in any order
    and do not overlap; the end of the last one may be None. A block belongs to the range of its first token. Priorities
    are 0 to 100, 35 by default; blocks of a lower one leave first. A duration begins when the last request lets the
    block go; None is for ever. `decode_priority` and `decode_duration_ms` are of the tokens behind the prompt.

    `transfer_mode` says where blocks are offloaded to: host memory, a block store in `directory` (gds), or a file for each
    block there (posix_debug_fallback). Without a directory the last two are host memory, which `warning` says.

    What can't be meant raises InvalidArgumentError, which names the range; so do bytes that are not a configuration, or of
    a newer version.
    """

    def __new__(
        cls,
        ranges: Sequence[_TokenRange] = (),
        *,
        decode_priority: int = 35,
        decode_duration_ms: int | None = None,
        transfer_mode: Literal["dram", "gds", "posix_debug_fallback"] = "dram",
        directory: str | PathLike[str] | None = None,
    ) -> RetentionConfig: ...
    @staticmethod
    def from_bytes(data: bytes) -> RetentionConfig: ...
    def to_bytes(self) -> bytes: ...
    @property
    def ranges(self) -> list[tuple[int, int | None, int, int | None]]: ...
    @property
    def decode_priority(self) -> int: ...
    @property
    def decode_duration_ms(self) -> int | None: ...
    @property
    def transfer_mode(self) -> Literal["dram", "gds", "posix_debug_fallback"]: ...
    @property
    def directory(self) -> str | None: ...
    @property
    def warning(self) -> str | None: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Allocation:
    """The blocks of a new sequence."""

    @property
    def sequence(self) -> int: ...
    @property
    def reused_tokens(self) -> int: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def warning(self) -> str | None: ...

class _Created(TypedDict):
    kind: Literal["created"]
    id: int
    group: int
    primary_blocks: int
    secondary_blocks: int

class _Stored(TypedDict):
    kind: Literal["stored"]
    id: int
    group: int
    key: bytes
    parent: bytes | None
    tokens: int
    priority: int

class _Removed(TypedDict):
    kind: Literal["removed"]
    id: int
    group: int
    key: bytes

_Tier: TypeAlias = Literal["primary", "secondary"]

class _Updated(TypedDict):
    kind: Literal["updated"]
    id: int
    group: int
    key: bytes
    tier: tuple[_Tier, _Tier] | None
    priority: tuple[int, int] | None

_Event: TypeAlias = _Created | _Stored | _Removed | _Updated
# Regions of which each is cut into as many equal parts as there are primary blocks, primary blocks, secondary blocks.
_Group: TypeAlias = tuple[Sequence[Region], int, int]

@final
class BlockManager:
    """Decides which blocks of KV a sequence gets, which are reused, offloaded, onboarded and evicted, and makes the copies,
    on threads of its own. It does what TensorRT-LLM's KV cache manager does.

    `groups`: for each group of layers its regions, primary blocks and secondary blocks. Primary blocks are the engine's
    pages: each region is cut into as many equal parts as there are, and page n is the n-th part of all of them. Regions
    are host memory, of one agent, which is shut down after the manager is closed. Secondary blocks are in host memory,
    which is taken when it is first used; or, as a request's `RetentionConfig` says, in a directory, as files or in a block
    store of `store_bytes` at most. A sequence has as many blocks in each group, of `tokens_per_block` tokens, and reuses
    the prefix that all groups have.

    `secondary_offload_min_priority`: blocks of a lower priority are removed instead of offloaded. `partial_reuse`: the first
    tokens of a block are reused, too, by a copy (`copy_on_partial_reuse`) where it is in use or others follow it.
    `events`: that are kept until `poll_events` takes them.

    A key is 16 bytes: the chained hash of a block's tokens, of all tokens before them and of what else the KV depends on.

    An engine calls `allocate` for a prompt, skips the first `reused_tokens`, calls `store` when blocks are computed,
    `append` for more tokens, and `free`. It leaves the pages of a sequence alone until that `is_ready`; then it reads
    `reused_tokens` anew and, if the sequence has fewer `blocks` than it needs, calls `append` for their tokens: a copy that
    fails costs hits. BusyError is no failure: the engine tries again when a sequence or a copy has ended (`wait`).

    Any thread may call it. A wrong argument raises InvalidArgumentError; a manager that was closed, ShutdownError.
    """

    def __new__(
        cls,
        groups: Sequence[_Group],
        *,
        tokens_per_block: int,
        secondary_offload_min_priority: int = 30,
        partial_reuse: bool = True,
        copy_on_partial_reuse: bool = True,
        events: int = 1024,
        store_bytes: int = 10737418240,
    ) -> BlockManager: ...
    def allocate(
        self,
        prompt_tokens: int,
        keys: Sequence[bytes],
        *,
        tokens: _Sequence | None = None,
        salt: int = 0,
        retention: RetentionConfig | None = None,
    ) -> Allocation: ...
    def append(self, sequence: int, tokens: int = 1) -> int: ...
    def store(self, sequence: int, keys: Sequence[bytes], *, tokens: _Sequence | None = None) -> int: ...
    def free(self, sequence: int, keys: Sequence[bytes] = (), *, tokens: _Sequence | None = None) -> None: ...
    def pin(self, sequence: int) -> int: ...
    def unpin(self, pin: int) -> None: ...
    def reset(self) -> None: ...
    def blocks(self, sequence: int, group: int = 0) -> list[int]: ...
    def is_ready(self, sequence: int) -> bool: ...
    def reused_tokens(self, sequence: int) -> int: ...
    def find_prefix(self, keys: Sequence[bytes]) -> tuple[int, int]: ...
    def usage(self, group: int = 0) -> dict[str, int]: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def poll_events(self) -> list[_Event]: ...
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None: ...
    def __enter__(self) -> BlockManager: ...
    def __exit__(self, *_exception: type[BaseException] | BaseException | TracebackType | None) -> None: ...

_T_co = TypeVar("_T_co", covariant=True)
# A range of a region: offset and length in bytes.
_Piece: TypeAlias = tuple[Region, int, int]
# One item per block.
_Memory: TypeAlias = Blocks | Sequence[_Piece | Sequence[_Piece]]

@final
class Store:
    """Blocks of KV on local disks, shared by the processes of a host.

    Opens the store in `directory`, or makes it; with several directories, on several devices, segments are spread over
    them, and their order must stay the same. All files together never have more than `capacity` bytes; a smaller one
    than before deletes the segments beyond it, with their blocks. `segment_bytes` (whole MiB), `blocks_max` and the directories are those of the process
    that makes the store. `direct`: whether blocks go past the page cache.

    Several processes may open the same directories, and see each other's blocks at once. What a disk does wrong costs
    hits and is counted in `stats`; a block comes back as it was put, or not at all. Any thread may call it. Close it, or
    leave its ``with`` block, before the agent is shut down.

    `host_bytes`: a tier in host memory, of this process alone, of 1 MiB or more. A put then returns once its blocks are in
    memory; they are written in the background. Other processes find them a little later, and a process that is killed
    loses those that were not written; `sync` waits for them.

    `put_wait`: seconds for which a put waits, all its blocks together and from the call on, for space where no segment is
    free, and for a lock of the index that a stopped process holds; with 0 such blocks are refused at once. Of a `put_async`
    with a `wait` they count from its turn on. Where others have waited for space for as long in vain, it does not wait for
    it again; closing the store ends all waits. With `host_bytes`, blocks in that memory are written once there is space, and
    a put of more than it has room for waits for 10 s, or for `put_wait` if that is longer.

    `hang_after`: seconds that an operation on a directory may take until the directory hangs; six times as many for syncing,
    making and removing a file. Its blocks are missed then, and nothing is put there, until the device has answered; other
    directories work.

    `adopt_empty`: an empty directory takes the place of one that the store has lost. Otherwise it counts as lost: it may be
    the folder below a device that is not mounted. It counts for the first process that opens the store, and not while another
    directory can't be read.

    `must_exist`: opening raises IoError where none of the directories has a store. Otherwise one is made there, also in the
    folder below a device that is not mounted.

    `objects`: the URL of an object store, ``s3://bucket/prefix``, ``gs://…``, ``az://…`` or ``file:///directory``. Blocks that
    this process puts are uploaded to it in the background, and `Space.prefetch` brings blocks from it. `object_options`
    override the environment's AWS_*, GOOGLE_* and AZURE_* (such as ``aws_endpoint_url``), or say how it is used:
    ``concurrency``, ``request_timeout``, ``priority_min`` and others, see docs/store.md.

    A wrong argument raises InvalidArgumentError; a directory or an object store that can't be used, IoError;
    processes of the store that can't be reached, BusyError; a store that was closed, ShutdownError.
    """

    def __new__(
        cls,
        agent: Agent,
        directory: str | PathLike[str] | Sequence[str | PathLike[str]],
        capacity: int,
        *,
        segment_bytes: int | None = None,
        blocks_max: int | None = None,
        direct: _Direct = "off",
        host_bytes: int = 0,
        put_wait: float = 0.0,
        hang_after: float = 10.0,
        adopt_empty: bool = False,
        must_exist: bool = False,
        objects: str | None = None,
        object_options: Mapping[str, str | float] | None = None,
    ) -> Store: ...
    def space(
        self,
        model: str,
        *,
        layout: bytes = b"",
        tenant: bytes = b"",
        adapter: str = "",
        group: int = 0,
        shard: tuple[int, int] = (0, 1),
    ) -> Space:
        """The blocks of a namespace: what two blocks must have in common, besides their hash, to be the same.

        `model`: its name and the revision of its weights. `layout`: how the bytes of a block are laid out. `tenant`: a
        salt; tenants do not see each other's blocks. `adapter`: the name and revision of a LoRA. `group`: the group of
        layers. `shard`: the part of a block that this rank has, of how many.
        """

    def watch(self, groups: Sequence[Sequence[Space]]) -> Watch:
        """Watches blocks by their hashes: of each group those that are in all of its spaces. No block is watched until it
        is added.
        """

    def sync(self) -> None:
        """Returns when the blocks that this process has put before would survive a loss of power."""

    def flush_objects(self, timeout: float | None = None) -> bool:
        """Waits until the blocks that this process has put before are uploaded to the object store, or dropped. False if
        `timeout` seconds passed first.
        """

    def stats(self) -> dict[str, int]:
        """What this process has done with the store since it opened it, and what the store holds now, by name."""

    def close(self) -> None:
        """Waits for what runs in the background, uploads blocks for a bounded time (5 s, ``close_timeout``), and seals what
        this process has written. A second close does nothing.
        """

    def __enter__(self) -> Store: ...
    def __exit__(self, *_exception: type[BaseException] | BaseException | TracebackType | None) -> None: ...

@final
class Space:
    """The blocks of one namespace of a store.

    A prompt is given by the hashes of its blocks, 16 to 64 bytes each, the first block first. The memory of blocks is
    registered with the store's agent: `Blocks`, or a sequence with one item per block, ``(region, offset, nbytes)`` or a
    sequence of these. It is the memory of the prompt's blocks from number `first` on.

    `get` and `put` are not interrupted: Ctrl-C takes effect when they return. The wait for an operation in the background
    ends with it, and the operation goes on.
    """

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """How many blocks of a prompt, from its beginning, are in the store. This is no use of them."""

    def touch(self, hashes: Sequence[bytes]) -> int:
        """Counts as a use of the blocks of a prompt that are in the store, where they are not read because the engine has
        them. Returns how many.
        """

    def get(self, hashes: Sequence[bytes], memory: _Memory, first: int = 0) -> int:
        """Reads blocks into memory. Returns how many were read, one after another from number `first` on: 0 if a block
        before is missing. Memory behind these may have been written, with anything.
        """

    def put(
        self,
        hashes: Sequence[bytes],
        memory: _Memory,
        first: int = 0,
        *,
        priority: int = 35,
        duration: float | None = None,
        leave: bool = False,
    ) -> Put:
        """Stores blocks; those that are there are not written again. The memory may be changed when this returns.

        Blocks of a lower `priority`, 0 to 100, leave first when the store is full. `duration`: seconds after which the
        priority is the default again or, with `leave`, the blocks leave at the next occasion.
        """

    def get_async(self, hashes: Sequence[bytes], memory: _Memory, first: int = 0) -> Pending[int]:
        """As `get`, in the background. The memory belongs to the store until the operation has ended."""

    def put_async(
        self,
        hashes: Sequence[bytes],
        memory: _Memory,
        first: int = 0,
        *,
        priority: int = 35,
        duration: float | None = None,
        leave: bool = False,
        wait: float = 0.0,
    ) -> Pending[Put]:
        """As `put`, in the background. The memory belongs to the store until the operation has ended.

        Four puts are carried out at a time, the others wait for their turn, in the order of the calls. Where none has begun
        for `hang_after` of the store, one more is carried out, up to eight in all. A further thread ends once five
        have nothing to do at the same time, so that four are left. `wait`: seconds for which this one may wait
        for its turn; if it has not begun by then, it ends, and all its blocks are refused (`Put.refused_waiting`). Beyond 2 GiB
        or 65 536 blocks of puts that wait, it is refused at once. With 0 it is refused at once beyond 256 MiB, and otherwise
        waits for its turn however long that takes. A put of any size may wait alone. `put_wait` of the store counts from its
        turn, or from the call if `wait` is 0.

        `Pending.cancel` ends a put that has not begun. Closing the store carries out the puts that wait, each unless its
        `wait` ends first.
        """

    def pin(self, hashes: Sequence[bytes], lease: float) -> Pin:
        """Keeps the blocks of a prompt that are on the disk, from its beginning, until the pin is released, or `lease`
        seconds have passed. None are kept if 4096 leases of all processes hold.
        """

    def prefetch(self, hashes: Sequence[bytes]) -> int:
        """Brings blocks that are missing here from the object store to the disk, one after another, up to the first that is
        not there or can't be brought, and those on the disk to host memory, where the store has such tiers. Returns how many blocks of the prompt, from its beginning, are here then. This is no
        use of them.

        A prompt that the object store does not have costs one request, and none within the next seconds.
        """

    def prefetch_async(self, hashes: Sequence[bytes]) -> Pending[int]:
        """As `prefetch`, in the background."""

@final
class Watch:
    """Watches blocks of a store by their hashes, for what an engine tells a router: each block that was added is reported
    as stored when it is on the disk, and as removed when it has left, whichever process put or removed it.

    One thread calls `gather`; others add blocks and take reports.
    """

    def add(self, group: int, hashes: Sequence[bytes]) -> None:
        """Watches blocks of a group, a number into the groups of `Store.watch`. Those that are in the store are reported at
        once, the others when they come. Of those that do not come, the last 65 536 are watched.
        """

    def gather(self, timeout: float) -> int:
        """Waits for changes of the store and turns them into reports. Returns how many were made: 0 if `timeout` seconds
        passed first. Raises ShutdownError when the store is closed.
        """

    def take(self, budget: int) -> list[tuple[int, bool, list[bytes]]]:
        """Takes reports in their order: of removed blocks `budget` at most, of stored ones an eighth of it. Each is a group,
        whether the blocks were removed, and their hashes.
        """

    @property
    def reports(self) -> int:
        """Reports that wait to be taken."""

    def reset(self, groups: Sequence[Sequence[Space]]) -> None:
        """Watches other groups. All blocks that were reported as stored are reported as removed."""

@final
class Blocks:
    """Where the bytes of blocks are in memory: one block per offset in a region. Reusable."""

    def __new__(cls, region: Region, offsets: _Numbers, nbytes: _Numbers) -> Blocks: ...
    def add_pieces(self, region: Region, offsets: _Numbers, nbytes: _Numbers) -> None:
        """Adds a piece to the end of each block, such as its part of the next layer: one offset per block."""

    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...

@final
class Pending(Generic[_T_co]):
    """An operation of a store in the background. It has exactly one outcome. Dropping the object does not stop it, and
    neither does cancelling a task that awaits it.
    """

    def done(self) -> bool: ...
    def poll(self) -> _T_co | None: ...
    def wait(self, timeout: float | None = None) -> _T_co | None: ...
    def fileno(self) -> int: ...
    def cancel(self) -> bool:
        """Ends a put that has not begun: its memory is the caller's again, and its blocks are refused
        (`Put.refused_waiting`). False if it has begun or ended, and for all other operations, which are not cancelled.
        """

    def __await__(self) -> Generator[Any, None, _T_co]: ...
    @classmethod
    def __class_getitem__(cls, key: Any) -> GenericAlias: ...

@final
class Pin:
    """A lease of blocks, which stay in the store until it is released, its ``with`` block ends, or its time has passed."""

    @property
    def blocks(self) -> int:
        """How many blocks, from the beginning of the prompt."""

    def release(self) -> None:
        """Lets the blocks leave. A second call does nothing."""

    def __enter__(self) -> Pin: ...
    def __exit__(self, *_exception: type[BaseException] | BaseException | TracebackType | None) -> None: ...

@final
class Put:
    """What became of the blocks of a put: stored now; not stored because they were there, because they were refused, or
    because of a device's error. Of the refused ones: no segment was free, a stopped process holds a lock of the index,
    the index was full, or the put did not begin (too much waited, it has waited for too long, or was cancelled).
    """

    @property
    def stored(self) -> int: ...
    @property
    def present(self) -> int: ...
    @property
    def refused(self) -> int: ...
    @property
    def refused_no_space(self) -> int: ...
    @property
    def refused_contended(self) -> int: ...
    @property
    def refused_index_full(self) -> int: ...
    @property
    def refused_waiting(self) -> int: ...
    @property
    def failed(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class PeerSummary:
    """Properties of a connection that the handshake established."""

    @property
    def name(self) -> str: ...
    @property
    def incarnation(self) -> str | None: ...
    @property
    def transport(self) -> str: ...
    @property
    def fallback(self) -> str | None: ...
    @property
    def version(self) -> int: ...
    @property
    def authenticated(self) -> bool: ...
    @property
    def checksum(self) -> bool: ...

@final
class Notification:
    """A short message between agents, delivered after the data that it follows."""

    def __new__(cls, name: str, message: bytes | str = b"") -> Notification: ...
    @property
    def sender(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def message(self) -> bytes: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

# What kvferry.mooncake is made of.

_Text: TypeAlias = str | bytes

@final
class MooncakeEngine:
    """The engine behind `kvferry.mooncake.TransferEngine`. Calls return Mooncake's codes."""

    def __new__(cls) -> MooncakeEngine: ...
    def initialize(self, local_hostname: _Text, metadata_server: _Text, protocol: _Text) -> int: ...
    @property
    def is_running(self) -> bool: ...
    @property
    def rpc_port(self) -> int: ...
    @property
    def identity(self) -> int: ...
    @property
    def last_error(self) -> str: ...
    def register(self, addresses: _Sequence, lengths: _Sequence, location: _Text) -> int: ...
    def set_after(self, after: _After) -> int: ...
    def is_gpu_memory(self, address: int) -> bool: ...
    def unregister(self, addresses: _Sequence) -> int: ...
    def transfer(
        self,
        write: bool,
        target: _Text,
        buffers: _Sequence,
        peer_addresses: _Sequence,
        lengths: _Sequence,
        notify: tuple[str, str] | None = None,
    ) -> int: ...
    def submit(
        self, write: bool, target: _Text, buffers: _Sequence, peer_addresses: _Sequence, lengths: _Sequence
    ) -> int: ...
    def wait(self, ids: _Sequence) -> int: ...
    def check(self, transfer_id: int) -> int: ...
    def allocate(self, length: int) -> int: ...
    def free(self, address: int) -> int: ...
    def first_address(self, segment: _Text) -> int: ...
    def notifications(self) -> list[tuple[str, str]]: ...
    def probe(self, target: _Text) -> int: ...

# kvferry.connector

# Block numbers, one list per group.
_Blocks: TypeAlias = Sequence[Sequence[int]]

def log_to_stderr(filter: str) -> None:
    """Writes kvferry's events that pass `filter` ("warn", "kvferry=debug", …) to stderr, unless ``KVFERRY_LOG`` has them
    written already.
    """

def prompt_id(tokens: Sequence[int], extra: Sequence[str] = ...) -> bytes:
    """The identity of a prompt: 16 bytes. Both engines compute it, and only KV of the same prompt is loaded.

    `extra`: what else the KV depends on, in an order that both engines use, such as the name of a LoRA or a cache salt.

    Raises TypeError or OverflowError, which name the first item that is no int of 32 bits.
    """

def counted_reasons() -> dict[str, list[str]]:
    """The reasons that counters can have, by the counter: so that each has a series before it counts."""

@final
class SchedulerHalf:
    """Decides, where requests are scheduled, what is handed over. One per engine. Calls take microseconds.

    `groups` are the engine's groups of layers in the order of its block tables: the kind (``full``, ``window``,
    ``chunk``, ``state``), the tokens of the window or chunk (else 0), and the tokens of a block of all context-parallel
    ranks together. `ranks`: how many ranks the engine has. `timeout`: seconds that a handoff may take in all. `eager`: the
    handoff of a request that generates one token is complete when its prompt is computed; else with the request's end,
    and may carry side data. `recomputed_tokens`: how many tokens at the end of a prompt a consumer computes again at
    least. `null_block`: the engine's number for no block. `idle`: how many blocks the engine's pool has, and how many of
    them may be kept for other engines that do nothing with them: held for consumers that have not asked for them, and,
    as many again, in loads whose producers have not answered.

    Any thread may call it. Requests are named by the engine's ids.
    """

    def __new__(
        cls,
        groups: Sequence[tuple[str, int, int]],
        *,
        ranks: int,
        timeout: float,
        eager: bool = True,
        recomputed_tokens: int = 0,
        null_block: int | None = None,
        idle: tuple[int, int] | None = None,
    ) -> SchedulerHalf: ...
    @property
    def engine_id(self) -> str:
        """32 hexadecimal digits, drawn for this incarnation of the engine."""

    def set_ranks(self, cards: Sequence[bytes]) -> None:
        """`WorkerHalf.card` of all ranks, in their order, once. Raises ValueError if they contradict each other."""

    def set_producers(self, producers: Sequence[str]) -> None:
        """Has requests refused that name others: see `WorkerHalf`, which checks them again. Raises ValueError."""

    def refuse(
        self, id: str, reason: Literal["internal", "resumable", "prompt_logprobs", "changed_weights"] = "internal"
    ) -> None:
        """A request that the caller failed with, or can't hand over: it is computed as if it had no parameters, and counted
        unless it has arrived.
        """

    def arrived(
        self, id: str, prompt_tokens: int, max_tokens: int, params: dict[str, Any] | None, prompt: bytes | None
    ) -> int:
        """A request has arrived, which generates at most `max_tokens`, with its ``kv_transfer_params`` and its `prompt_id`. Later
        calls name it by its `id`. Returns how many tokens of its prompt are prefilled: a producer's are fewer than the
        prompt has where the consumer computes the last ones again.
        """

    def matched(self, id: str, computed: int) -> int | None:
        """How many tokens can be loaded beyond the `computed` ones; None if that is not known yet."""

    def allocated(self, id: str, external: int, blocks: _Blocks) -> None:
        """A request has got all its blocks, to load `external` tokens beyond those that were computed when it was matched
        last.
        """

    def waits_for_blocks(self, id: str) -> bool:
        """Whether `allocated` of this request would change anything."""

    def step(self, scheduled: Sequence[tuple[str, int, int, bool, _Blocks]], preempted: Sequence[str]) -> bytes:
        """The step for `WorkerHalf.apply` of every rank; empty if there is nothing to do.

        `scheduled`: requests that produce, each with the tokens cached before the step, the tokens that the step
        computes, whether the blocks are all it has (it is new, or was preempted), and these or else its new blocks.
        `preempted`: requests that lost their blocks.
        """

    def step_of(
        self,
        ids: dict[str, Any],
        steps: Callable[[dict[str, bool]], Sequence[tuple[str, int, int, bool, _Blocks]]],
        preempted: Sequence[str],
    ) -> tuple[bytes, bool, list[str], list[tuple[str, str, bool]]]:
        """As `step`, for an engine that does not know which of its requests produce. Also whether any was scheduled, and
        the loads and endings of the step, for `WorkerHalf.apply`.

        `ids`: the requests of the step, as keys. `steps` returns what `step` takes as `scheduled`. It is called if any of
        the requests may be handed over, with these: True if all of a request's steps must be returned, False if only one
        with all its blocks. What it raises is raised here, and the step has no effect then.
        """

    def give_up(self, ids: Sequence[str]) -> None:
        """Has these requests not handed over, if they produce and have not ended."""

    def give_up_all(self) -> None:
        """The engine's weights have changed, or may have: of what has arrived nothing is handed over or loaded any more. All
        offers are withdrawn and all loads are cancelled.
        """

    def finished(
        self,
        id: str,
        reason: Literal["length", "stop", "abort", "error"],
        blocks: _Blocks | None,
        side_data: bytes | None = None,
    ) -> tuple[bool, dict[str, Any] | None] | None:
        """A request has ended, with these blocks, which are read only if it produces. True if its blocks must be kept until
        `sent` reports it; and the ``kv_transfer_params`` of its response. None if it is not known: it asks for no handoff,
        or has not arrived. Let one that was rejected arrive, and end it again, so that its producer frees its blocks.
        """

    def reported(self, rank: int, notes: bytes) -> None:
        """Takes the last item of `WorkerHalf.reports`, before `sent` and `received` of the same step."""

    def sent(self, ids: Sequence[str]) -> None:
        """All ranks have reported these requests as sent."""

    def received(self, ids: Sequence[str]) -> None:
        """All ranks have reported these requests as received."""

    def take_side_data(self, id: str) -> list[bytes]:
        """Side data of a request that was loaded, one item per rank of the producer that it was loaded from."""

    def has_pending_work(self) -> bool:
        """Whether the engine must go on stepping although no request runs."""

    def take_stats(self) -> dict[str, Any] | None:
        """What was counted since the last call, None if nothing was: loads that ended (`fetched`), withdrawn offers
        (`withdrawn`) and requests without a handoff (`refused`), each by reason; `fetched_tokens`, `freed`, `offered`,
        `offered_tokens`.
        """

    def gauges(self) -> dict[str, int]:
        """Counts of what is kept, by name: all zero when nothing is under way."""

@final
class WorkerHalf:
    """One rank's side: announces what is computed, loads, and reports what has ended. Calls return at once.

    `layout` is a JSON object as docs/internals/layout.md describes it; its regions are `regions`, registered with `agent`. `rank` is
    this rank's number in its engine. `timeout`: as for the scheduler half. `wait`: seconds, at most `timeout`, that one side
    waits for the other's request: a producer with a prompt that is computed, a consumer before it is. `model`: properties of what the engine computes with; engines that give one property
    different values refuse each other. `announce`: ``layers`` (chunks of a prefill in up to `pieces` of layers of 1 MiB
    at least, the last piece of a prompt halved until it is a 64th), ``chunks`` or ``end``. Raises ValueError if the layout is not sound. `producers`: the
    addresses, networks (``10.1.0.0/16``), host names and ``*.domain`` that KV is loaded from, ``*`` for all; None for this host and the
    network that the agent listens in, or for all if the agent has a secret.

    Any thread may call it.
    """

    def __new__(
        cls,
        agent: Agent,
        layout: str,
        regions: Sequence[Region],
        *,
        rank: int,
        timeout: float,
        wait: float = 30.0,
        model: dict[str, str] = ...,
        announce: Literal["layers", "chunks", "end"] = "layers",
        pieces: int = 2,
        producers: Sequence[str] | None = None,
    ) -> WorkerHalf: ...
    @property
    def card(self) -> bytes:
        """This rank, described for `SchedulerHalf.set_ranks`."""

    @property
    def producers(self) -> list[str]:
        """Those that KV is loaded from, for `SchedulerHalf.set_producers`."""

    def apply(
        self,
        metadata: bytes,
        after: _After | None = None,
        *,
        loads: Sequence[str] = ...,
        endings: Sequence[tuple[str, str, bool]] = ...,
    ) -> None:
        """Takes a step, before anything is computed or overwritten. Raises ValueError for metadata of another version.
        Then nothing is handed over that was offered before, and the loads that run fail. What the step itself has is not
        known: `loads` and `endings`, from `SchedulerHalf.step_of`, are reported as failed and as sent, so that no engine
        waits for them.

        `after`, needed for KV in memory of a GPU, names the work that used the blocks before: the step's loads write the
        blocks after it. Loads fail if that work can't be recorded. Without it, or with anything else, the loads of the
        step fail, all else of it is carried out, and the call raises ValueError or TypeError.
        """

    def fetch(self) -> None:
        """Begins the loads of the step."""

    def layer_computed(self, layer: int, after: _After | None = None) -> None:
        """A layer of the step is computed, numbered as in the layout. In memory of a GPU it is computed, and announced,
        once the work that `after` names has run.
        """

    def step_computed(self, after: _After | None = None) -> None:
        """All layers of the step are computed, as `layer_computed` says. Once per step."""

    def step_failed(self, detail: str) -> None:
        """The step was given up: what it computes is not handed over. Instead of `step_computed`."""

    def reports(self) -> tuple[list[str], list[str], list[str], bytes | None]:
        """What has ended since the last call: requests sent, requests received, those of them that failed, and notes for
        `SchedulerHalf.reported`.
        """

    def take_loads(self) -> list[tuple[str, float, int, tuple[str, str] | None]]:
        """Loads that ended since the last call: the request, seconds from the first read to the end, bytes, and for a
        failed one what went wrong, and the reason in words.
        """

    def gauges(self) -> dict[str, int]:
        """Counts of what is kept, by name."""

    def close(self) -> None:
        """Ends everything. A second call does nothing; other calls raise ValueError after it."""

# A prompt: a key of 32 bytes that names its content, its `prompt_id`, and the number of its blocks.
_Prompt: TypeAlias = tuple[bytes, bytes, int]

@final
class Exchange:
    """Hands prompts over between engines that give a connector no parameters of a request: each is found by its content.

    An engine that prefills tells its followers which prompts its ranks have in slots of memory; one that decodes follows
    others, and has a prompt in its own slots before it is promised. `agent` is the one whose address followers know.
    `ranks`: the agent of each rank, its layout as for `WorkerHalf`, in which slots are blocks, and the memory of the slots,
    registered with that agent. `groups`: how many groups of layers there are, with blocks of `block_tokens` tokens. `timeout`:
    seconds for which a prompt is kept. `model` and `producers`: as for `WorkerHalf`. `publishes`: others may follow, 256 at
    most, which their hosts share. `follows`: ``host:port`` of the agents of the engines to follow; they are reached again and
    again. Raises ValueError for what is not sound.

    Any thread may call it. Calls return at once, but for `fetch` and `close`; in a forked child they do nothing.
    """

    def __new__(
        cls,
        agent: Agent,
        ranks: Sequence[tuple[Agent, str, Region]],
        groups: int,
        *,
        block_tokens: int,
        slots: int,
        timeout: float,
        model: dict[str, str] = ...,
        producers: Sequence[str] | None = None,
        publishes: bool = False,
        follows: Sequence[str] = ...,
    ) -> Exchange: ...
    def offer(self, given: _Prompt) -> tuple[int, int] | None:
        """A prompt that is computed here will be offered. Its number, and the first of its slots; None if none follows.
        Raises MemoryError if there are not as many slots in a row.
        """

    def copies(self, offer: int, begin: int, end: int, copy: int) -> None:
        """All ranks copy these blocks of an offer to its slots, in the copy with this number. Copies are numbered from 1,
        and are not named after later ones.
        """

    def ended(self, offer: int, copy: int) -> None:
        """The request of an offer has ended, whose last blocks are in this copy. What is missing is not handed over."""

    def made(self, copied: int, lost: int) -> None:
        """`copied`: the last copy that all ranks have made, or have not been able to; `lost`: the last of the latter."""

    def fetch(
        self, given: _Prompt, first: int, timeout: float
    ) -> tuple[tuple[int, int] | None, list[tuple[str, str, float]]]:
        """Fetches the blocks of a prompt from `first` on, if an engine offers it: the run of their slots; and why others
        did not hand it over: ``room`` with the slots that there are not, ``failed`` with the reason, ``timeout`` with
        the address of an engine that is not asked for so many seconds, 2 at first and 60 at most.
        """

    def give(self, slots: tuple[int, int]) -> None:
        """Slots that `fetch` has returned are free again."""

    @property
    def followers(self) -> int:
        """How many engines follow this one."""

    @property
    def refused(self) -> int:
        """How many were refused, or lost their place, because there were too many."""

    def gauges(self) -> dict[str, int]:
        """Counts of what is kept, by name."""

    def close(self) -> None:
        """Ends everything. A `fetch` that waits returns. A second call does nothing."""
