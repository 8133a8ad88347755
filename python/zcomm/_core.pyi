"""Types of the extension (python/bindings)."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, overload

from typing_extensions import Buffer

_Params = TypeVar("_Params", contravariant=True)

class DType:
    name: str
    __members__: dict[str, DType]
    float32: DType
    float64: DType
    float16: DType
    bfloat16: DType
    int8: DType
    uint8: DType
    int32: DType
    int64: DType
    bool: DType

class ReduceOp:
    name: str
    __members__: dict[str, ReduceOp]
    sum: ReduceOp
    avg: ReduceOp
    min: ReduceOp
    max: ReduceOp
    prod: ReduceOp

class ReduceOrder:
    name: str
    any: ReduceOrder
    rank: ReduceOrder

class CollectiveMismatch(RuntimeError):
    """Error of ranks that called different operations. Raised on every rank; names both calls and their lines."""

class CudaError(RuntimeError):
    """Error of a CUDA call; names the call, the device and the remedy."""

class PeerLost(ConnectionError):
    """Error of a rank that died or left while other ranks needed it. ``rank``: its number in the job; ``group_rank``:
    in the communicator. -1: not known."""

    rank: int
    group_rank: int

class Work:
    def wait(self, timeout: float | None = None) -> None: ...
    def wait_on(self, stream: int, timeout: float | None = None) -> None:
        """Wait as wait() does; but the stream of this native handle waits for the device, not that of the call."""
    def done(self) -> bool: ...

class Stop:
    """Flag for the blocking calls of the threads within it: once it is set, they raise RuntimeError(why)."""

    def __init__(self, why: str) -> None: ...
    def set(self) -> None: ...
    @property
    def is_set(self) -> bool: ...
    def __enter__(self) -> Stop: ...
    def __exit__(self, *raised: object) -> None: ...

def check_stop() -> None:
    """Raise RuntimeError if a Stop that this thread is within is set."""

class WorkerLoad:
    """Calls that a thread which serves a queue has left, for ranks that wait for each other to be found."""

    def serve(self) -> None:
        """On the thread itself, before its first call."""
    def add(self) -> None:
        """Count a call, before the thread can see it."""
    def done(self) -> None: ...
    def begin_wait(self) -> None:
        """Note that this thread waits for a call."""
    def end_wait(self) -> None: ...

class Memory(Buffer):
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Listener:
    def __init__(self) -> None: ...
    @property
    def address(self) -> str: ...

class Mesh:
    @staticmethod
    def connect(
        rank: int, world_size: int, listener: Listener, addresses: list[str], token: str, timeout_s: float
    ) -> Mesh: ...
    @staticmethod
    def adopt(rank: int, world_size: int, sockets: list[tuple[int, int]]) -> Mesh: ...
    def lost(self) -> int | None: ...
    def leave(self) -> None: ...

Spans = list[tuple[int, int]]

class Source:
    """Rank that a received message came from, set by recv."""

    def __init__(self) -> None: ...
    rank: int

class Communicator:
    rank: int
    world_size: int
    reads_own_parts: bool
    coded_parts: int
    @staticmethod
    def create(
        mesh: Mesh,
        timeout_s: float = ...,
        slot_nbytes: int = ...,
        slot_count: int = ...,
        one_shot_nbytes: int = ...,
        limit_s: float = ...,
        warn_s: float = ...,
    ) -> Communicator: ...
    @staticmethod
    def create_linked(
        mesh: Mesh,
        links: list[list[int]],
        timeout_s: float = ...,
        segment_nbytes: int = ...,
        limit_s: float = ...,
        warn_s: float = ...,
    ) -> Communicator: ...
    @staticmethod
    def create_hierarchical(
        mesh: Mesh,
        host_mesh: Mesh,
        host_of_rank: list[int],
        links: list[list[int]],
        timeout_s: float = ...,
        segment_nbytes: int = ...,
        slot_nbytes: int = ...,
        slot_count: int = ...,
        limit_s: float = ...,
        warn_s: float = ...,
    ) -> Communicator: ...
    # Each call returns None when it is blocking (async_op False): then it is done.
    def all_reduce_tensor(self, tensor: Any, op: ReduceOp, name: str, async_op: bool, /) -> Work | None: ...
    @overload
    def all_reduce(
        self, spans: Spans, dtype: DType, op: ReduceOp, name: str, async_op: bool, /, order: ReduceOrder = ...
    ) -> Work | None: ...
    @overload
    def all_reduce(
        self, spans: Spans, dtype: DType, op: ReduceOp, name: str, async_op: bool, coding: Coding, /
    ) -> Work | None: ...
    def reduce(
        self, spans: Spans, dtype: DType, op: ReduceOp, root: int, name: str, async_op: bool, /
    ) -> Work | None: ...
    @overload
    def reduce_scatter(
        self,
        spans: Spans,
        out: Spans,
        dtype: DType,
        op: ReduceOp,
        out_dtype: DType,
        accumulate: bool,
        name: str,
        async_op: bool,
        /,
        order: ReduceOrder = ...,
    ) -> Work | None: ...
    @overload
    def reduce_scatter(
        self,
        spans: Spans,
        out: Spans,
        dtype: DType,
        op: ReduceOp,
        out_dtype: DType,
        accumulate: bool,
        own: Sequence[tuple[int, int, int]],  # begin and count in the chunk, address
        name: str,
        async_op: bool,
        /,
        order: ReduceOrder = ...,
    ) -> Work | None: ...
    @overload
    def reduce_scatter(
        self,
        spans: Spans,
        out: Spans,
        dtype: DType,
        op: ReduceOp,
        out_dtype: DType,
        accumulate: bool,
        name: str,
        async_op: bool,
        coding: Coding,
        /,
    ) -> Work | None: ...
    @overload
    def all_gather(self, spans: Spans, out: Spans, dtype: DType, name: str, async_op: bool, /) -> Work | None: ...
    @overload
    def all_gather(
        self, spans: Spans, out: Spans, dtype: DType, name: str, async_op: bool, coding: Coding, /
    ) -> Work | None: ...
    def broadcast(self, spans: Spans, dtype: DType, root: int, name: str, async_op: bool, /) -> Work | None: ...
    def gather(
        self, spans: Spans, out: Spans, dtype: DType, root: int, name: str, async_op: bool, /
    ) -> Work | None: ...
    def scatter(
        self, spans: Spans, out: Spans, dtype: DType, root: int, name: str, async_op: bool, /
    ) -> Work | None: ...
    def all_to_all(self, spans: Spans, out: Spans, dtype: DType, name: str, async_op: bool, /) -> Work | None: ...
    def barrier(self, name: str, async_op: bool, /) -> Work | None: ...
    def verify(self, behind: bool) -> None: ...
    def after(self, awaited: Event | Work, async_op: bool = True, /) -> Work | None:
        """Start later calls only when an event is done (a copy from a device, say) or an operation has ended. Local."""
    def send(
        self, spans: Spans, dtype: DType, dst: int, tag: int, name: str, async_op: bool, /, element: str = ""
    ) -> Work | None: ...
    def recv(
        self,
        spans: Spans,
        dtype: DType,
        src: int,
        tag: int,
        name: str,
        async_op: bool,
        source: Source,
        /,
        element: str = "",
    ) -> Work | None: ...
    def fail(self, reason: str, /) -> Work:
        """Fail on all ranks with this reason, when earlier calls have ended. Local."""
    def describe(self, text: str, ranks: Sequence[int], /) -> None:
        """Let ``text`` end the messages of failed operations: its ranks are ``ranks`` of the job. Before the first
        call."""
    def split_devices(self, color: int, key: int, /) -> tuple[bool, NcclPart | None]:
        """Split a communicator of NCCL by ncclCommSplit, if it can. color -1: no part. Collective.

        Returns: whether it could, the same on all ranks, and the part.
        """
    def suspend_deadline(self) -> None: ...
    def resume_deadline(self) -> None: ...
    def forget_callers(self) -> None:
        """Note that the calls so far do not tell which threads will call, for ranks that wait for each other."""
    def allocate(self, nbytes: int) -> Memory: ...
    def allocate_shared(self, nbytes: int) -> Memory: ...
    def duplicate(self) -> Communicator: ...
    def memory(self) -> dict[str, int]: ...
    def close(self) -> None: ...

def reduce(
    dst: list[int],
    src: list[int],
    count: int,
    dtype: DType,
    out_dtype: DType,
    op: ReduceOp,
    accumulate: bool = False,
) -> None:
    """Reduce by address, in the order given: dst[d][i] (+)= src[0][i] op src[1][i] op ... (device/kernels.hpp)."""

class CodecKind:
    name: str
    __members__: dict[str, CodecKind]
    block_int: CodecKind
    fp8_e4m3: CodecKind
    sign: CodecKind

class Codec:
    """Form in which a collective sends a tensor's elements (zcomm/codec.hpp).

    bits: block_int 8 or 4, fp8_e4m3 8, sign 1. rotate: 0 or 32.
    Raises: ValueError if the options do not go with the kind.
    """

    def __init__(self, kind: CodecKind, bits: int = 8, rotate: int = 0, stochastic: bool = False) -> None: ...
    @property
    def kind(self) -> CodecKind: ...
    @property
    def bits(self) -> int: ...
    @property
    def rotate(self) -> int: ...
    @property
    def stochastic(self) -> bool: ...
    @property
    def id(self) -> int:
        """All options in one number, for ranks that compare their calls."""
    def encoded_nbytes(self, count: int) -> int:
        """Return the bytes of ``count`` encoded elements, a multiple of 64."""

class Coding:
    """Arguments of a collective with a codec, by address (zcomm/communicator.hpp)."""

    def __init__(
        self,
        codec: Codec,
        keep: float = 0.0,
        error_dtype: DType = ...,
        errors: Spans = ...,
        server_errors: Spans = ...,
        masks: list[int] = ...,
        differences: bool = False,
    ) -> None: ...

def all_reduce_part(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return begin and count of the elements that ``rank`` sums in an all_reduce with a codec."""

def error_count(error_dtype: DType, count: int, step: int) -> int:
    """Return the count of an error buffer for ``count`` elements that are encoded in parts of ``step``."""

def encode(
    codec: Codec,
    out: int,
    data: int,
    dtype: DType,
    count: int,
    error: int = 0,
    error_dtype: DType = ...,
    keep: float = 0.0,
    base: int = 0,
    base_dtype: DType = ...,
    mask: int = 0,
    seed: int = 0,
    first_index: int = 0,
) -> None:
    """Encode by address; ``out`` is aligned to 64 bytes. Updates error and base (device/codec.hpp)."""

def decode(
    codec: Codec,
    out: int,
    parts: Sequence[int],
    count: int,
    dtype: DType = ...,
    accumulate: bool = False,
    divide_by: float = 1.0,
    mask: int = 0,
) -> None:
    """Decode by address: out (+)= the sum of the encoded ``parts`` in their order, in fp32, over ``divide_by``."""

class Event:
    """A point in a stream (device/device.hpp)."""

    def done(self) -> bool: ...
    def synchronize(self) -> None: ...
    def wait_for(self, patience_s: float) -> bool: ...
    def handle(self) -> bytes: ...

class Stream:
    """Operations in order, by address; each call returns at once (device/device.hpp)."""

    def record(self, event: Event) -> None: ...
    def wait(self, event: Event) -> None: ...
    def copy(self, dst: int, src: int, nbytes: int) -> None: ...
    def fill(self, dst: int, value: int, nbytes: int) -> None: ...
    def reduce(
        self,
        dst: list[int],
        src: list[int],
        count: int,
        dtype: DType,
        out_dtype: DType,
        op: ReduceOp,
        accumulate: bool = False,
    ) -> None: ...
    def cast(self, dst: int, dst_dtype: DType, src: int, src_dtype: DType, count: int) -> None: ...
    def done(self) -> bool: ...
    def synchronize(self) -> None: ...
    @property
    def native(self) -> int: ...
    @property
    def is_host(self) -> bool: ...

class DeviceMemory:
    """Memory, freed with its last owner. `torch.from_dlpack(memory)` is a tensor of its bytes, and such an owner."""

    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    def __dlpack__(self, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class Device:
    @property
    def name(self) -> str: ...
    def make_stream(self, urgent: bool = False) -> Stream: ...
    def adopt_stream(self, native: int) -> Stream: ...
    def make_event(self, shared: bool = False) -> Event: ...
    def allocate(self, nbytes: int) -> DeviceMemory: ...
    def memory(self) -> tuple[int, int]:
        """Return the bytes free, and the bytes in all."""
    def share(self, address: int) -> bytes: ...
    def open_memory(self, handle: bytes, nbytes: int) -> DeviceMemory: ...
    def open_event(self, handle: bytes) -> Event: ...
    def lose_after(self, n: int) -> None:
        """Make the n-th operation from now find the device lost; 0 ends that. Tests only."""

def page_lock(address: int, nbytes: int) -> bool:
    """Lock host memory for copies of CUDA; False without CUDA."""

def page_unlock(address: int) -> None: ...
def cuda_device(index: int) -> Device: ...

class NcclPart:
    """One rank's part of a communicator of NCCL, made by ncclCommSplit."""

def nccl_version(library: str = "") -> str: ...
def make_nccl_communicator(
    control: Communicator,
    guard: Communicator,
    messages: Communicator | None,
    watched: Mesh,
    device: int,
    library: str,
    timeout_s: float,
    joined: NcclPart | None = None,
) -> Communicator: ...
def call_site() -> str:
    """Return the program's call site, as errors show it ("train.py:42"); empty if it is unknown."""

def set_call_site(site: str) -> None:
    """Set the call site that errors name for this thread's next calls; empty: from where they are made."""

def check_overlap(
    kind: str, spans: Spans, out: Spans, dtype: DType, out_dtype: DType, rank: int, accumulate: bool = False
) -> None:
    """Check the buffers of a call. Raises: ValueError naming two that share memory and must not."""

def set_call_stream(stream: int) -> None:
    """Set the stream, by its native handle, of this thread's next calls on device tensors."""

def make_cuda_ipc_communicator(
    mesh: Mesh,
    device: Device,
    timeout_s: float,
    slot_nbytes: int = 4194304,
    limit_s: float = 0.0,
    warn_s: float = 60.0,
) -> Communicator: ...
def allocate_on(communicator: Communicator, device: Device, nbytes: int) -> DeviceMemory:
    """Allocate symmetric memory of a communicator over devices; ``device`` is this rank's."""

class AddressRange:
    def __init__(self, nbytes: int, reads_nan: bool = False) -> None: ...
    @property
    def nbytes(self) -> int: ...
    def memory(self, offset: int, nbytes: int) -> Memory: ...
    def alias(self, offset: int, shared: Memory, from_offset: int, nbytes: int) -> None: ...
    def take(self, offset: int, source: AddressRange, from_offset: int, nbytes: int) -> None: ...
    def unmap(self, offset: int, nbytes: int) -> None: ...

class PrivateView:
    def __init__(self, address: int, nbytes: int) -> None: ...
    def memory(self) -> Memory: ...
    def copied(self) -> list[tuple[int, int]]: ...
    def merge(self, own: list[tuple[int, int]]) -> int: ...

class Lease(Buffer):
    @property
    def nbytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class PinnedArena:
    def __init__(
        self, budget_nbytes: int | None = None, page_lock: bool = True, keep_resident: bool = False
    ) -> None: ...
    def allocate(self, nbytes: int) -> Lease: ...
    def stats(self) -> dict[str, int]: ...

class SwapFile:
    def __init__(
        self,
        directory: str | list[str],
        nbytes: int = 0,
        engine: str = "auto",
        block_nbytes: int = ...,
        depth: int = ...,
        direct: bool = True,
        checksum: bool = True,
    ) -> None: ...
    def reserve(self, key: str, nbytes: int) -> None: ...
    def release(self, key: str) -> None: ...
    def write(self, key: str, ptr: int, nbytes: int) -> Work: ...
    def read(self, key: str, ptr: int, nbytes: int) -> Work: ...
    def written(self) -> list[tuple[str, int]]: ...
    def wait(self) -> None: ...
    COPY_NAME: str
    def copy_to(self, files: list[str], durable: bool = True) -> dict[str, Any]: ...
    def copy_beside(self) -> dict[str, Any]: ...
    def stats(self) -> dict[str, Any]: ...
    def close(self) -> None: ...

def crc32c(ptr: int, nbytes: int) -> int: ...

class _Numbers:
    """Of a step. For type checkers: the extension has no such base."""

    lr: float
    weight_decay: float
    maximize: bool
    grad_scale: float

class AdamParams(_Numbers):
    beta1: float
    beta2: float
    eps: float
    adamw: bool
    step: int

class SgdParams(_Numbers):
    momentum: float
    dampening: float
    nesterov: bool
    buffer: bool
    first: bool

class LionParams(_Numbers):
    beta1: float
    beta2: float

class AdagradParams(_Numbers):
    lr_decay: float
    eps: float
    step: int

class OptimShard:
    def __init__(
        self,
        weight: int,
        weight_dtype: DType,
        grad: int,
        grad_dtype: DType,
        state: int,
        count: int,
        tile_count: int,
        begin: int,
        end: int,
        state_dtype: DType = ...,
        first_index: int = 0,
        addend: int = 0,
        addend_dtype: DType = ...,
    ) -> None: ...

class Batch(Protocol[_Params]):
    """Step of many shards, prepared. For type checkers: the extension has the classes below, and no base of them."""

    def add(
        self, shard: OptimShard, group: int, counter: int = 0, buffer: bool = False, first: bool = False
    ) -> None: ...
    def step(
        self, groups: Sequence[_Params], grads: Sequence[int], threads: int = 0, squares: ExactSum | None = None
    ) -> None: ...

class AdamBatch(Batch[AdamParams]):
    def __len__(self) -> int: ...

class SgdBatch(Batch[SgdParams]):
    def __len__(self) -> int: ...

class LionBatch(Batch[LionParams]):
    def __len__(self) -> int: ...

class AdagradBatch(Batch[AdagradParams]):
    def __len__(self) -> int: ...

class ExactSum(Buffer):
    def clear(self) -> None: ...
    def add(self, term: float) -> None: ...
    def value(self) -> float: ...
    def normalize(self) -> None: ...
    def add_squares(self, grad: int, dtype: DType, count: int) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def adam_step(shard: OptimShard, params: AdamParams, threads: int = 0, squares: ExactSum | None = None) -> None: ...
def adam_encode_state(shard: OptimShard, m: int, v: int) -> None: ...
def adam_decode_state(shard: OptimShard, m: int, v: int) -> None: ...
def sgd_step(shard: OptimShard, params: SgdParams, threads: int = 0, squares: ExactSum | None = None) -> None: ...
def lion_step(shard: OptimShard, params: LionParams, threads: int = 0, squares: ExactSum | None = None) -> None: ...
def adagrad_step(
    shard: OptimShard, params: AdagradParams, threads: int = 0, squares: ExactSum | None = None
) -> None: ...
def split_master(shard: OptimShard, master: int, arrays: int = 2) -> None: ...
def join_master(shard: OptimShard, master: int, arrays: int = 2) -> None: ...

ADAM_FACTORS_NBYTES: int

class StreamAdamBatch:
    """Parameters that a step on a device takes together; counter: of an fp32 number there, the steps so far."""

    def __len__(self) -> int: ...
    def add(self, shard: OptimShard, counter: int) -> None: ...
    def step(
        self,
        stream: Stream,
        params: AdamParams,
        grads: Sequence[int],
        factors: int,
        clip: float = 1.0,
        lr: int = 0,
        grad_scale: int = 0,
        found_inf: int = 0,
    ) -> None:
        """Put the step on ``stream``.

        factors: ADAM_FACTORS_NBYTES per item. lr, grad_scale, found_inf: of fp32 numbers on the device, or 0.
        """

def stream_adam_step(stream: Stream, shard: OptimShard, params: AdamParams) -> None: ...
def stream_lion_step(stream: Stream, shard: OptimShard, params: LionParams) -> None: ...
def stream_sgd_step(stream: Stream, shard: OptimShard, params: SgdParams) -> None: ...
def stream_adagrad_step(stream: Stream, shard: OptimShard, params: AdagradParams) -> None: ...
def stream_squares(stream: Stream, sums: int, grad: int, dtype: DType, count: int) -> None:
    """Put the squares of blocks of 64 elements into ``sums``, for add_block_sums."""

def stream_checksum(stream: Stream, sum: int, data: int, nbytes: int) -> None:
    """Add the checksum of ``nbytes`` at ``data`` to ``sum``, an int64 on the device (device/checksum.hpp)."""

EXACT_SUM_WORDS: int

def stream_norm(stream: Stream, words: int, grad: int, dtype: DType, count: int) -> None:
    """Add the squares to ``words``, EXACT_SUM_WORDS int64 on the device; for add_words."""

def add_words(sum: ExactSum, words: int) -> None: ...
def add_block_sums(sum: ExactSum, sums: int, count: int) -> None: ...
def page_nbytes() -> int: ...
def table_nbytes() -> int:
    """Return the bytes that one page table maps."""

def moves_mappings() -> bool:
    """Return True if AddressRange.take is served here."""

def isa() -> str: ...
def best_isa() -> str: ...
def cuda_info() -> str: ...
def cuda_available() -> bool: ...
def cuda_uuids() -> list[str]: ...
def set_threads(count: int) -> None: ...
def threads() -> int: ...
def env_variables() -> list[tuple[str, str]]: ...
