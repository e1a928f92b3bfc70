"""Messages between the engine core, which is rank 0, and the other ranks of an engine, and the socket for them.

RankConfigure                    ──▶  rank
                                 ◀──  RankLoaded | RankFailed
RunStep, FinishStep, CommitStep  ──▶         no answer: the model's collectives are the answer
Allocate, Measure, Release, …    ──▶
                                 ◀──  Done, RankMemory, MethodDone, BlockBytes, BlockIdentity | RankFailed
StopRank                         ──▶

Both ends run the same code, because the core starts the ranks, so these messages need no compatibility between
versions. Arrays are sent as bytes: int64, little-endian.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Any

import msgspec

from ...models.attention.page_layout import PageLayout
from ...processes.ipc import SOCKET_BUFFER_BYTES


class RankConfigure(msgspec.Struct, array_like=True, tag="configure"):
    """Configures a rank: its number and the model to load.

    Args:
        config_json: the engine's configuration.
        folder: the model's folder.
        rank: number of the rank; 0 is the core.
        timeout_s: how long a collective waits for the other ranks.
        meeting_host, meeting_port, own_host: as ``NetworkMeeting``; empty if all ranks are on one host.
    """

    config_json: bytes
    folder: str
    rank: int
    timeout_s: float
    meeting_host: str = ""
    meeting_port: int = 0
    own_host: str = ""


class SightBytes(msgspec.Struct, array_like=True):
    """The bytes of a ``forward.VisionInputs``; ``dtype`` is the dtype of the rows of ``deeper``."""

    axes: bytes | None = None
    places: bytes | None = None
    deeper: tuple[bytes, ...] = ()
    dtype: str = ""


class RunStep(msgspec.Struct, array_like=True, tag="run"):
    """The bytes of a ``ModelInput``.

    The block table is sent as its changes: ``changed_blocks`` at ``changed_rows`` and ``changed_columns``. It has
    ``table_width`` columns, and its rows are ``state_slots``. With ``num_groups`` each request has that many rows, and
    ``slot_mapping`` contains one group after the other. If it ``is_started``, other steps may be in flight, and
    ``FinishStep`` finishes it.
    """

    token_ids: bytes
    positions: bytes
    logit_rows: bytes
    slot_mapping: bytes
    query_lens: bytes
    seq_lens: bytes
    state_slots: bytes
    block_size: int
    table_width: int
    changed_rows: bytes
    changed_columns: bytes
    changed_blocks: bytes
    token_lora: bytes | None = None
    token_types: bytes | None = None
    embeds: bytes | None = None
    embeds_dtype: str = ""
    visible_ends: bytes | None = None
    is_started: bool = False
    num_groups: int = 0
    sight: SightBytes | None = None


class FinishStep(msgspec.Struct, array_like=True, tag="finish"):
    """Finish the oldest step that was started."""


class CommitStep(msgspec.Struct, array_like=True, tag="commit"):
    """See ``Forward.commit``."""


class Allocate(msgspec.Struct, array_like=True, tag="allocate"):
    """See ``Forward.allocate``, and with ``pages`` see ``PagedByGroups.allocate_pages``.

    With ``captures`` graphs are captured afterwards, which run collectives.
    """

    num_blocks: int
    block_size: int
    num_slots: int
    captures: bool = False
    pages: PageLayout | None = None


class Profile(msgspec.Struct, array_like=True, tag="profile"):
    """See ``Forward.profile``."""

    num_tokens: int
    num_logit_rows: int


class CaptureNext(msgspec.Struct, array_like=True, tag="capture_next"):
    """Capture the missing graph that most steps would have taken. All ranks have run the same steps."""


class Measure(msgspec.Struct, array_like=True, tag="measure"):
    """Measure the memory. All ranks run their largest forward together."""


class ReleaseWeights(msgspec.Struct, array_like=True, tag="release"):
    """See ``Sleepable.release``."""

    level: int


class RestoreWeights(msgspec.Struct, array_like=True, tag="restore"):
    """See ``Sleepable.restore``."""


class ExchangeWeights(msgspec.Struct, array_like=True, tag="exchange"):
    """See ``Exchange.exchange``."""

    folder: str


class PutWeightsBack(msgspec.Struct, array_like=True, tag="put_back"):
    """See ``Exchange.put_back``."""


class KeepWeights(msgspec.Struct, array_like=True, tag="keep"):
    """See ``Exchange.keep``."""


class WritePart(msgspec.Struct, array_like=True, tag="write_part"):
    """See ``part_state.write_part``: write into ``folder``, under the rank's name."""

    folder: str


class WakeUpWhole(msgspec.Struct, array_like=True, tag="awake"):
    """Capture graphs again, after all sleeping parts are awake."""


class AttachAdapters(msgspec.Struct, array_like=True, tag="attach_adapters"):
    """See ``attach_adapters``. It may run a forward with collectives, which all ranks run together."""


class LoadAdapter(msgspec.Struct, array_like=True, tag="load_adapter"):
    """Begin to read an adapter, while steps run; see ``load_adapter``. It has no answer."""

    folder: str
    digest: str


class AskAdapter(msgspec.Struct, array_like=True, tag="ask_adapter"):
    """Ask whether an adapter has been read. The answer is ``NotYet`` until then."""

    digest: str


class AssignAdapter(msgspec.Struct, array_like=True, tag="assign_adapter"):
    """Put a loaded adapter into a slot. It has no answer."""

    slot: int
    digest: str


class DropAdapter(msgspec.Struct, array_like=True, tag="drop_adapter"):
    """Forget a loaded adapter. It has no answer."""

    digest: str


class ReleaseAdapters(msgspec.Struct, array_like=True, tag="release_adapters"):
    """See ``Sleepable.release``."""

    level: int


class RestoreAdapters(msgspec.Struct, array_like=True, tag="restore_adapters"):
    """See ``Sleepable.restore``."""


class StartTrace(msgspec.Struct, array_like=True, tag="start_trace"):
    """Start to record a profile of torch; see ``shared.control.engine.StartProfile``."""

    prefix: str
    with_stack: bool
    use_gzip: bool


class StopTrace(msgspec.Struct, array_like=True, tag="stop_trace"):
    """Stop recording and write the file of the profile."""


class ReadIdentity(msgspec.Struct, array_like=True, tag="read_identity"):
    """See ``offload.blocks.identity_of``. The answer is ``BlockIdentity``."""


class MeasureBlock(msgspec.Struct, array_like=True, tag="measure_block"):
    """The answer is ``BlockBytes``."""


class ShareRows(msgspec.Struct, array_like=True, tag="share_rows"):
    """Map the rows of a ``SharedBlocks``.

    Args:
        path: the memory's file, ``[num_rows, sum(part_bytes)]``.
        part_bytes: bytes of each rank's part of a block, in the order of ranks.
    """

    path: str
    num_rows: int
    part_bytes: list[int]


class CopyBlocks(msgspec.Struct, array_like=True, tag="copy_blocks"):
    """Copy this rank's part of ``blocks`` to the first rows, or with ``into_cache`` from them.

    Args:
        number: which rows, counted in the order of ``ShareRows``.
    """

    number: int
    blocks: list[int]
    into_cache: bool


class CallMethod(msgspec.Struct, array_like=True, tag="call_method"):
    """Run a registered method; see ``shared.control.rpc.CollectiveRpc``."""

    method: str
    args: list[Any]
    kwargs: dict[str, Any]


class StopRank(msgspec.Struct, array_like=True, tag="stop"):
    """End the rank."""


class RankLoaded(msgspec.Struct, array_like=True, tag="loaded"):
    """The rank has loaded its part of the model."""


class RankMemory(msgspec.Struct, array_like=True, frozen=True, tag="measured"):
    """The free memory of a rank, and the memory that its part of the model uses.

    Args:
        free_bytes, activation_bytes, graph_bytes: as ``execution.memory.DeviceMemory``.
        bytes_per_token, bytes_per_request: as in ``Forward``, for this rank's layers and heads.
        weight_bytes: size of the weights of its part.
    """

    free_bytes: int
    bytes_per_token: int
    bytes_per_request: int
    weight_bytes: int
    activation_bytes: int = 0
    graph_bytes: int = 0


class Done(msgspec.Struct, array_like=True, tag="done"):
    """The command has been run."""


class NotYet(msgspec.Struct, array_like=True, tag="not_yet"):
    """The rank is still reading the adapter."""


class MethodDone(msgspec.Struct, array_like=True, tag="method_done"):
    """The result of a method on this rank, as plain data."""

    result: Any


class BlockBytes(msgspec.Struct, array_like=True, tag="block_bytes"):
    """The bytes of the rank's part of a KV block."""

    num_bytes: int


class BlockIdentity(msgspec.Struct, array_like=True, tag="block_identity"):
    """The identity of the rank's parts of KV blocks; None while its weights are unloaded."""

    identity: bytes | None


class RankFailed(msgspec.Struct, array_like=True, tag="failed"):
    """A command failed. The rank ends after a failed load or step, and otherwise keeps working.

    Args:
        code: code of a ``PenstockError``, else empty.
        message: a sentence, or the type and first line of the exception.
        trace: empty for errors that a sentence explains.
        at_ns: time of the failure by ``time.monotonic_ns``, a clock that all ranks of a host share. The first failure
            is the cause, and later ones follow from it. Between hosts it is corrected by ``clock_offset_ns``.
        has_ended: whether the rank ends, so that this is no answer to a later command.
    """

    code: str
    message: str
    trace: str = ""
    at_ns: int = 0
    has_ended: bool = False


RankCommand = (
    RankConfigure
    | RunStep
    | FinishStep
    | CommitStep
    | Allocate
    | Profile
    | CaptureNext
    | Measure
    | ReleaseWeights
    | RestoreWeights
    | ExchangeWeights
    | PutWeightsBack
    | KeepWeights
    | WritePart
    | WakeUpWhole
    | AttachAdapters
    | LoadAdapter
    | AskAdapter
    | AssignAdapter
    | DropAdapter
    | ReleaseAdapters
    | RestoreAdapters
    | StartTrace
    | StopTrace
    | ReadIdentity
    | MeasureBlock
    | ShareRows
    | CopyBlocks
    | CallMethod
    | StopRank
)
RankAnswer = RankLoaded | RankMemory | Done | NotYet | MethodDone | BlockBytes | BlockIdentity | RankFailed

_LENGTH = struct.Struct("<Q")
_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """Return the bytes of a message, for ``RankChannel.send_bytes``."""
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


class RankChannel:
    """An end of the socket between the engine core and a rank.

    Args:
        sock: a connected stream socket.
        kind: the union of messages that the other end sends.
    """

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        sock.setblocking(True)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        self._socket = sock
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._reading = threading.Lock()

    def send(self, message: Any) -> None:
        """Send one message.

        Raises:
            OSError: the other end has closed the socket.
        """
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """Send the output of ``encode``, which is encoded once for all ranks. Raises as ``send``."""
        self._socket.sendall(data)

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message; None if none arrives within ``timeout_s``. Several threads may wait for messages.

        Raises:
            EOFError: the other end has closed the socket.
        """
        give_up_at = None if timeout_s is None else time.monotonic() + timeout_s
        while select.select([self._socket], [], [], _time_until(give_up_at))[0]:
            with self._reading:
                if select.select([self._socket], [], [], 0)[0]:  # unless another thread has read it
                    (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
                    return self._decoder.decode(self._read(length))
        return None

    def shut_down(self) -> None:
        """Let the other end read the end of the stream, and still receive from it."""
        with suppress(OSError):  # of a connection that has ended
            self._socket.shutdown(socket.SHUT_WR)

    @property
    def is_closed(self) -> bool:
        """Whether the other end has closed the socket. Earlier messages from it may still be unread."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close this end; the other end notices."""
        self._socket.close()

    def fileno(self) -> int:
        """Return the file descriptor of the socket."""
        return self._socket.fileno()

    def _read(self, length: int) -> memoryview:
        data = bytearray(length)
        view, start = memoryview(data), 0
        while start < length:
            try:
                count = self._socket.recv_into(view[start:])
            except OSError:  # of a connection that was reset, or whose host is unreachable
                count = 0
            if count == 0:
                raise EOFError("the other end has closed the ranks' socket")
            start += count
        return view


def _time_until(give_up_at: float | None) -> float | None:
    return None if give_up_at is None else max(0.0, give_up_at - time.monotonic())
