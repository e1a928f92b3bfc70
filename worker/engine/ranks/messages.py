"""What the engine core, which is rank 0, and the other ranks of an engine say to each other.

RankConfigure                    ──▶  rank
                                 ◀──  RankLoaded | RankFailed
RunStep, FinishStep, CommitStep  ──▶         no answer: the model's collectives are the answer
Allocate, Measure, Release, …    ──▶
                                 ◀──  Done, RankMemory, MethodDone | RankFailed
StopRank                         ──▶

Both ends are the same code, started by one another, so nothing of this has to be understood by another version.
Arrays travel as their bytes: int64, little-endian, whatever they are.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...models.attention.page_layout import PageLayout


class RankConfigure(msgspec.Struct, array_like=True, tag="configure"):
    """What a rank is to load, and who it is.

    Args:
        config_json: the engine's configuration.
        folder: of the model.
        rank: its number; 0 is the core.
        timeout_s: how long a collective waits for the other ranks.
    """

    config_json: bytes
    folder: str
    rank: int
    timeout_s: float


class SightBytes(msgspec.Struct, array_like=True):
    """A ``forward.VisionInputs``; ``dtype`` is that of the rows of ``deeper``."""

    axes: bytes | None = None
    places: bytes | None = None
    deeper: tuple[bytes, ...] = ()
    dtype: str = ""


class RunStep(msgspec.Struct, array_like=True, tag="run"):
    """A ``ModelInput``. Of its block table only what has changed: ``changed_blocks`` at rows and columns.

    ``table_width`` are its columns, and its rows are ``state_slots``. With ``num_groups`` each request has as many
    rows, and ``slot_mapping`` is that of one group after the other. Of one that ``is_started`` there are others under
    way, and ``FinishStep`` says when it ends.
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
    """See ``Forward.allocate``. ``captures`` says that graphs are captured then, with the collectives in them.

    With ``pages`` see ``PagedByGroups.allocate_pages``.
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


class Measure(msgspec.Struct, array_like=True, tag="measure"):
    """Say what memory there is; all ranks try their largest forward together."""


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
    """See ``part_state.write_part``: into ``folder``, under the rank's own name."""

    folder: str


class WakeUpWhole(msgspec.Struct, array_like=True, tag="awake"):
    """Everything is back in its place: capture what needs it."""


class StartTrace(msgspec.Struct, array_like=True, tag="start_trace"):
    """Record what torch does."""


class StopTrace(msgspec.Struct, array_like=True, tag="stop_trace"):
    """Write the file."""


class CallMethod(msgspec.Struct, array_like=True, tag="call_method"):
    """Run a registered method; see ``shared.control.rpc.CollectiveRpc``."""

    method: str
    args: list[Any]
    kwargs: dict[str, Any]


class StopRank(msgspec.Struct, array_like=True, tag="stop"):
    """End."""


class RankLoaded(msgspec.Struct, array_like=True, tag="loaded"):
    """The rank's part of the model is there."""


class RankMemory(msgspec.Struct, array_like=True, frozen=True, tag="measured"):
    """What a rank has room for, and what its part of the model takes.

    Args:
        free_bytes, activation_bytes, graph_bytes: as ``execution.memory.DeviceMemory``.
        bytes_per_token, bytes_per_request: as ``Forward`` says, of this rank's layers and heads.
        weight_bytes: of its part of the model.
    """

    free_bytes: int
    bytes_per_token: int
    bytes_per_request: int
    weight_bytes: int
    activation_bytes: int = 0
    graph_bytes: int = 0


class Done(msgspec.Struct, array_like=True, tag="done"):
    """What was asked has been done."""


class MethodDone(msgspec.Struct, array_like=True, tag="method_done"):
    """What a method returned in this rank: plain data."""

    result: Any


class RankFailed(msgspec.Struct, array_like=True, tag="failed"):
    """It could not be done. Behind a load or a step the rank ends; else it stays.

    Args:
        code: of a ``PenstockError``, else empty.
        message: a sentence, or type and first line of what was raised.
        trace: empty for errors that a sentence explains.
        at_ns: when, by the clock of ``time.monotonic_ns``, which all ranks of a host share: who failed first is to
            blame, and others fail of it.
    """

    code: str
    message: str
    trace: str = ""
    at_ns: int = 0


RankCommand = (
    RankConfigure
    | RunStep
    | FinishStep
    | CommitStep
    | Allocate
    | Profile
    | Measure
    | ReleaseWeights
    | RestoreWeights
    | ExchangeWeights
    | PutWeightsBack
    | KeepWeights
    | WritePart
    | WakeUpWhole
    | StartTrace
    | StopTrace
    | CallMethod
    | StopRank
)
RankAnswer = RankLoaded | RankMemory | Done | MethodDone | RankFailed
