"""A rank above 0. It holds its part of the model and of the caches, and runs the commands of rank 0.

It has no requests, no scheduler and no sampling. The collectives inside the model carry its results to rank 0.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn

from ....shared.control.engine import StartProfile
from ....shared.errors import PenstockError
from ...config.engine_config import EngineConfig
from ...core.garbage import freeze_loaded_objects
from ...models.attention.pages import PagedByGroups
from ...models.lean.captured import CapturedForward
from ...models.lean.staged import StagedForward
from ...models.loaded import LoadedModel
from ...models.loading.loader import load_model, load_weights
from ...models.parallel.groups import RankGroups
from ...models.parallel.meeting import FileMeeting, NetworkMeeting
from ...models.placing.device import return_free_memory
from ...models.weights.live_state import empty_module
from ...models.weights.movable import ModelWeights, WeightsExchange
from ...models.weights.part_state import part_path, write_part
from ..control.rpc_methods import load_rpc_methods
from ..control.traces import ProcessTraceRecorder
from ..offload.blocks import identity_of
from ..rpc import RpcEngine
from ..setup.host import load_native_kernels, set_loading_threads, set_num_threads
from .adapters import FollowingSlots, attach_slots
from .blocks import FollowingBlocks
from .memory import capture_again, measure_rank
from .messages import (
    Allocate,
    AskAdapter,
    AssignAdapter,
    AttachAdapters,
    BlockBytes,
    BlockIdentity,
    CallMethod,
    CaptureNext,
    CommitStep,
    CopyBlocks,
    Done,
    DropAdapter,
    ExchangeWeights,
    FinishStep,
    KeepWeights,
    LoadAdapter,
    Measure,
    MeasureBlock,
    MethodDone,
    NotYet,
    Profile,
    PutWeightsBack,
    RankChannel,
    RankConfigure,
    RankFailed,
    RankLoaded,
    ReadIdentity,
    ReleaseAdapters,
    ReleaseWeights,
    RestoreAdapters,
    RestoreWeights,
    RunStep,
    ShareRows,
    StartTrace,
    StopRank,
    StopTrace,
    WakeUpWhole,
    WritePart,
)
from .step_codec import StepReceiver

_PLAIN_ANSWERS = (NotYet, MethodDone, BlockBytes, BlockIdentity)

log = structlog.get_logger(__name__)


class Follower:
    """Runs commands on the rank's part of the model.

    Args:
        model: the part of this rank.
        folder: the folder that it was loaded from.
        load: load the part's weights from a folder.
    """

    def __init__(
        self, config: EngineConfig, model: LoadedModel, rank: int, folder: Path, load: Callable[[Path], nn.Module]
    ) -> None:
        self._config = config
        self._model = model
        self._rank = rank
        # Stored here, because sleeping weights have no device.
        self._device = model.device
        self._steps = StepReceiver(self._device)
        self._folder = self._next_folder = folder
        self._weights = ModelWeights(model.weights, lambda: load(self._folder))
        self._exchange = WeightsExchange(self._weights, load)
        self._recorder = ProcessTraceRecorder(config, f"-rank{rank}")
        self._methods = load_rpc_methods(config)
        self._rpc_engine = RpcEngine(config, None, model, rank)
        blocks = FollowingBlocks(model, self._device, rank)
        # An error in these ends the rank and the engine, because the other ranks wait in a collective.
        self._computing: dict[type, Callable[[Any], Any]] = {
            RunStep: self._run,
            FinishStep: self._finish,
            CommitStep: lambda _: model.forward.commit(),
            Profile: self._profile,
            CaptureNext: self._capture_next,
            Measure: lambda _: measure_rank(model, config),
            WakeUpWhole: self._wake_up_whole,
            CopyBlocks: blocks.copy_part,
        }
        # An error in these becomes the answer.
        self._preparing: dict[type, Callable[[Any], Any]] = {
            Allocate: self._allocate,
            ReleaseWeights: lambda command: self._weights.release(command.level),
            RestoreWeights: lambda _: self._weights.restore(),
            ExchangeWeights: self._exchange_weights,
            PutWeightsBack: lambda _: self._exchange.put_back(),
            KeepWeights: self._keep_weights,
            WritePart: self._write_part,
            StartTrace: lambda command: self._recorder.start(
                StartProfile(command.prefix, command.with_stack, command.use_gzip)
            ),
            StopTrace: lambda _: self._recorder.stop(),
            AttachAdapters: self._attach_adapters,
            CallMethod: self._call_method,
            MeasureBlock: blocks.measure_part,
            ShareRows: blocks.share_rows,
            ReadIdentity: lambda _: BlockIdentity(identity_of(config, folder, model)),
        }

    def do(self, command: Any) -> Any:
        """Run ``command`` and return its answer; None if it has no answer.

        Raises:
            Exception: any error of a computation.
        """
        computing = self._computing.get(type(command))
        if computing is not None:
            return computing(command)
        preparing = self._preparing[type(command)]
        if isinstance(command, Allocate) and command.captures:
            preparing(command)
            return Done()
        try:
            result = preparing(command)
        except Exception as error:
            log.exception("rank_command_failed", command=type(command).__name__)
            return failure_from(error)
        return result if isinstance(result, _PLAIN_ANSWERS) else Done()

    @property
    def _staged(self) -> StagedForward:
        forward = self._model.forward
        assert isinstance(forward, StagedForward), "the model is not computed in stages"
        return forward

    @torch.inference_mode()
    def _run(self, command: RunStep) -> None:
        step = self._steps.step_of(command)
        if command.is_started:
            self._staged.start(step)
        else:
            self._model.forward.run(step)

    @torch.inference_mode()
    def _finish(self, _: FinishStep) -> None:
        self._staged.finish()

    def _capture_next(self, _: CaptureNext) -> Done:
        forward = self._model.forward
        assert isinstance(forward, CapturedForward), "rank 0 has graphs, and this rank has none"
        forward.capture_next()
        return Done()

    @torch.inference_mode()
    def _profile(self, command: Profile) -> Done:
        self._model.forward.profile(command.num_tokens, command.num_logit_rows)
        return Done()

    def _wake_up_whole(self, _: WakeUpWhole) -> Done:
        capture_again(self._model)
        return Done()

    def _exchange_weights(self, command: ExchangeWeights) -> None:
        self._next_folder = Path(command.folder)
        self._exchange.exchange(self._next_folder)

    def _keep_weights(self, _: KeepWeights) -> None:
        self._folder = self._next_folder
        self._exchange.keep()

    def _write_part(self, command: WritePart) -> None:
        model = self._model
        write_part(
            model, lambda: empty_module(self._config, self._folder, model), part_path(command.folder, self._rank)
        )

    def _call_method(self, command: CallMethod) -> MethodDone:
        return MethodDone(self._methods.run(self._rpc_engine, command.method, command.args, command.kwargs))

    def _attach_adapters(self, _: AttachAdapters) -> None:
        slots = FollowingSlots(attach_slots(self._config, self._model))
        self._computing |= {
            AssignAdapter: slots.assign_part,
            DropAdapter: slots.drop_part,
            LoadAdapter: slots.begin_load,
        }
        self._preparing |= {
            AskAdapter: slots.check_load,
            ReleaseAdapters: slots.release_slots,
            RestoreAdapters: slots.restore_slots,
        }

    def _allocate(self, command: Allocate) -> None:
        forward, sizes = self._model.forward, (command.block_size, command.num_slots, self._device)
        if command.pages is None:
            forward.allocate(command.num_blocks, *sizes)
        else:
            assert isinstance(forward, PagedByGroups)
            forward.allocate_pages(command.pages, command.num_blocks, *sizes)
        if command.num_blocks == 0:
            return_free_memory()


def follow(channel: RankChannel, rendezvous_fd: int) -> int:
    """Load, then run commands until the core stops the rank or exits; return the exit status of the process."""
    try:
        first = channel.receive()
        assert isinstance(first, RankConfigure)
        follower = _load(first, rendezvous_fd)
        freeze_loaded_objects()
        channel.send(RankLoaded())
        while not isinstance(command := channel.receive(), StopRank):
            answer = follower.do(command)
            if answer is not None:
                channel.send(answer)
    except (EOFError, BrokenPipeError):
        log.debug("engine_core_gone")
    except Exception as error:
        failure = failure_from(error)
        failure.has_ended = True
        # An error without a traceback is explained by its message, which the core logs itself.
        if failure.trace:
            log.error("rank_died", error=failure.message, trace=failure.trace)
        with suppress(OSError):
            channel.send(failure)
        return 1
    return 0


def failure_from(error: Exception) -> RankFailed:
    """Return the message that reports ``error``."""
    if isinstance(error, PenstockError):
        return RankFailed(error.code, str(error), at_ns=time.monotonic_ns())
    first_line = next(iter(str(error).strip().splitlines()), "")
    trace = "".join(traceback.format_exception(error))
    return RankFailed("", f"{type(error).__name__}: {first_line}", trace, time.monotonic_ns())


def _load(first: RankConfigure, rendezvous_fd: int) -> Follower:
    config, folder = EngineConfig.decode(first.config_json), Path(first.folder)
    torch.manual_seed(config.seed)
    load_native_kernels(config)
    set_loading_threads(config)
    meeting = (
        NetworkMeeting(first.meeting_host, first.meeting_port, first.own_host)
        if first.meeting_port
        else FileMeeting(rendezvous_fd)
    )
    groups = RankGroups.join(
        meeting, config.layout, first.rank, config.device, first.timeout_s, first.rank % config.num_ranks_on_host
    )
    model = load_model(config, folder, groups)
    set_num_threads(config, model)

    def load(folder: Path) -> nn.Module:
        torch.manual_seed(config.seed)
        return load_weights(config, folder, model)

    return Follower(config, model, first.rank, folder, load)
