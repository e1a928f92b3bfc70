"""The ranks of an engine of several processes, as used by rank 0, the engine core."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import torch.distributed as dist
from torch import Tensor, nn

from ....shared.control.engine import CollectiveRpc, StartProfile
from ....shared.errors import EngineCallError, EngineStateError, ModelLoadError
from ....shared.messages.core import RankSetup
from ....shared.values.shown import shown
from ...config.engine_config import EngineConfig
from ...models.adapters.slots import AdapterSlots
from ...models.attention.page_layout import PageLayout
from ...models.loaded import LoadedModel
from ...models.loading.loader import load_model
from ...models.parallel.groups import COLLECTIVE_TIMEOUT_S, RankGroups
from ...models.weights.movable import Exchange, ModelWeights, WeightsExchange
from ...models.weights.part_state import joined_state, part_path, write_part
from ..control.sleep import Sleepable
from ..control.traces import ProcessTraceRecorder, TraceRecorder
from ..execution.kv_cache import KVCacheSize, shape_of
from ..offload.blocks import DeviceBlocks, identity_of, make_device_blocks
from ..setup.checks import check_images
from ..setup.host import set_num_threads
from .adapters import attach_slots
from .hosts import OneHost, SeveralHosts
from .memory import capture_again, measure_rank, size_for_all
from .messages import (
    AttachAdapters,
    BlockIdentity,
    CallMethod,
    ExchangeWeights,
    KeepWeights,
    Measure,
    MethodDone,
    PutWeightsBack,
    RankConfigure,
    RankFailed,
    RankMemory,
    ReadIdentity,
    ReleaseWeights,
    RestoreWeights,
    StartTrace,
    StopTrace,
    WakeUpWhole,
    WritePart,
)
from .process import RankProcess
from .sharded_forward import sharded_forward
from .shared_blocks import SharedBlocks
from .shared_slots import SharedSlots
from .team import FILES_TIMEOUT_S, RankLostError, RankRefusedError, RankTeam, failure_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PARTS_FOLDER = "parts-of-ranks"

log = structlog.get_logger(__name__)


class SeveralRanks:
    """See ``interface.Ranks``. The processes start in the constructor, so that they import modules meanwhile.

    Raises:
        OSError: the host cannot start another process.
        ConfigurationError: the other hosts cannot join this one.
    """

    def __init__(self, config: EngineConfig, folder: Path, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        self._config = config
        self._folder = folder
        self._timeout_s = timeout_s
        # No fork with a GPU, because initialized CUDA does not survive a fork, and even a query may initialize it.
        may_fork = config.device == "cpu"
        self._hosts = SeveralHosts(config, folder) if config.nnodes > 1 else OneHost()
        processes = [
            RankProcess(rank, self._hosts.rendezvous_fd, may_fork=may_fork)
            for rank in range(1, config.num_ranks_on_host)
        ]
        for process in processes:
            log.info("rank_started", rank=process.rank, rank_pid=process.pid, is_forked=process.is_forked)
        self._team = RankTeam([*processes, *self._hosts.gather()], timeout_s)
        self._groups: RankGroups | None = None
        self._local: LoadedModel | None = None
        self._memories: list[RankMemory] = []
        self._num_block_rows = 0

    @property
    def local(self) -> LoadedModel:
        """The part of this rank."""
        assert self._local is not None, "call load first"
        return self._local

    def load(self, report: Callable[[], None]) -> LoadedModel:
        config = self._config
        try:
            meeting = self._hosts.meeting()
            for process in self._team.processes:
                configure = RankConfigure(
                    config.encode(), str(self._folder), process.rank, self._timeout_s, *meeting.address
                )
                process.configure(configure)
            self._groups = RankGroups.join(meeting, config.layout, 0, config.device, self._timeout_s, device_index=0)
            self._local = load_model(config, self._folder, self._groups, report=report)
            answers = self._team.gather(self._team.loading)
        except Exception as error:
            raise self._team.failed_load(error) from error
        for process, answer in zip(self._team.processes, answers, strict=True):
            if isinstance(answer, RankFailed):
                failure = failure_of(process, answer)
                raise self._team.failed_load(failure) from failure
        self._team.set_loaded()
        set_num_threads(config, self._local)
        local = self._local.forward
        model = check_images(dataclasses.replace(self._local, forward=sharded_forward(local, self._team)))
        self._local = dataclasses.replace(model, forward=local)
        return model

    def attach_adapters(self) -> AdapterSlots:
        make_slots = partial(SharedSlots, self._team)
        slots, _ = self._team.together(
            AttachAdapters(), lambda: attach_slots(self._config, self.local, make_slots), FILES_TIMEOUT_S
        )
        return slots

    def size_cache(self, pages: PageLayout | None = None) -> KVCacheSize:
        local, others = self._team.compute(Measure(), lambda: measure_rank(self.local, self._config))
        self._memories = [local, *(answer for answer in others if isinstance(answer, RankMemory))]
        return size_for_all(self._config, self.local, self._memories, pages)

    def device_blocks(self) -> DeviceBlocks:
        self._num_block_rows += 1
        local = self.local
        return SharedBlocks(
            self._team,
            make_device_blocks(lambda: local.forward.caches, local.device),
            local.device,
            self._num_block_rows - 1,
        )

    def block_identity(self) -> bytes | None:
        own, answers = self._team.together(
            ReadIdentity(), lambda: identity_of(self._config, self._folder, self.local), FILES_TIMEOUT_S
        )
        parts = [own, *(answer.identity for answer in answers if isinstance(answer, BlockIdentity))]
        # The keys of a layer depend on all layers before it, and on all heads of these, so on all ranks' weights.
        present = [part for part in parts if part is not None]
        return hashlib.sha256(b"".join(present)).digest() if len(present) == len(parts) else None

    def weights(self, load_again: Callable[[], nn.Module]) -> Sleepable:
        return _Weights(ModelWeights(self.local.weights, load_again), self._team)

    def exchange(self, load: Callable[[Path], nn.Module]) -> Exchange:
        weights = ModelWeights(self.local.weights, lambda: self.local.weights)
        return SharedExchange(WeightsExchange(weights, load), self._team)

    def live_state(self, make_module: Callable[[], PreTrainedModel], folder: Path) -> dict[str, Tensor]:
        if self._config.nnodes > 1:
            raise EngineStateError(
                f"the ranks of the engine are on {self._config.nnodes} hosts, and all must write into one folder; save "
                "the weights from an engine on one host"
            )
        return _gathered_state(self.local, self._team, make_module, folder)

    def awake(self) -> None:
        self._team.compute(WakeUpWhole(), lambda: capture_again(self.local))

    def recorder(self) -> TraceRecorder:
        return _Recorder(ProcessTraceRecorder(self._config, "-rank0"), self._team)

    def run_method(self, call: CollectiveRpc, run: Callable[[], Any], changes_model: bool) -> Any:
        # A long timeout, because a method may take long; the stall watch notices one that must not.
        question = self._team.ask_ranks(CallMethod(call.method, call.args, call.kwargs), FILES_TIMEOUT_S)
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        try:
            results[0] = run()
        except Exception as error:  # from the operator's code
            failures[0] = str(error) if isinstance(error, EngineCallError) else f"{type(error).__name__}: {error}"
            log.exception("rank_command_failed", command=CallMethod.__name__)
        for process, answer in zip(self._team.processes, self._team.gather(question), strict=True):
            if isinstance(answer, MethodDone):
                results[process.rank] = answer.result
            elif isinstance(answer, RankFailed):
                failures[process.rank] = answer.message
        if not failures:
            return [results[rank] for rank in sorted(results)]
        failed = EngineCallError(_describe_failures(call.method, failures, list(results)))
        raise self._team.loss(failed) if changes_model else failed

    def setup(self, num_blocks: int, pages: PageLayout | None = None) -> RankSetup | None:
        config = self._config
        return RankSetup(
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=config.pipeline_parallel_size,
            enable_expert_parallel=config.enable_expert_parallel,
            pids=[os.getpid(), *self._team.pids],
            hosts=["", *(process.host for process in self._team.processes)] if config.nnodes > 1 else [],
            weight_bytes=[memory.weight_bytes for memory in self._memories],
            kv_cache_bytes=[
                num_blocks * shape_of(pages, memory.bytes_per_token, config).block_bytes for memory in self._memories
            ],
        )

    def close(self) -> None:
        self._team.stop()
        self._hosts.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _describe_failures(method: str, failures: dict[int, str], done: list[int]) -> str:
    reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(failures.items()))
    others = f"; it completed in rank {', '.join(map(str, sorted(done)))}" if done else ""
    return f"RPC method {shown(method)} failed in {reasons}{others}"


class _Weights:
    """The ``Sleepable`` of all ranks' weights. They are loaded on all ranks or on none."""

    def __init__(self, local: ModelWeights, team: RankTeam) -> None:
        self._local = local
        self._team = team

    def release(self, level: int) -> None:
        self._team.together(ReleaseWeights(level), lambda: self._local.release(level))

    def restore(self) -> None:
        try:
            self._team.together(RestoreWeights(), self._local.restore, FILES_TIMEOUT_S)
        except RankRefusedError as error:
            raise ModelLoadError(str(error)) from error


class SharedExchange:
    """The ``Exchange`` of all ranks. Each rank reads its own part.

    Every method raises ``RankLostError`` once a rank is lost.
    """

    def __init__(self, local: WeightsExchange, team: RankTeam) -> None:
        self._local = local
        self._team = team

    def exchange(self, folder: Path) -> None:
        try:
            self._team.together(ExchangeWeights(str(folder)), lambda: self._local.exchange(folder), FILES_TIMEOUT_S)
        except RankLostError as error:
            # If the rank has failed but still works, this restores its weights; if it is lost, this raises.
            self.put_back()
            raise ModelLoadError(str(error)) from error
        except Exception:
            self.put_back()
            raise

    def put_back(self) -> None:
        self._team.together(PutWeightsBack(), self._local.put_back)

    def keep(self) -> None:
        self._team.together(KeepWeights(), self._local.keep)


def _gathered_state(
    local: LoadedModel, team: RankTeam, make_module: Callable[[], PreTrainedModel], folder: Path
) -> dict[str, Tensor]:
    """Return the weights as ``Ranks.live_state``: each rank writes its part into ``folder``, and rank 0 joins them.

    Raises:
        RankLostError: a rank is lost.
    """
    parts = folder / _PARTS_FOLDER
    parts.mkdir()
    try:
        team.together(
            WritePart(str(parts)), lambda: write_part(local, make_module, part_path(parts, 0)), FILES_TIMEOUT_S
        )
        paths = [part_path(parts, rank) for rank in range(1 + len(team.processes))]
        return joined_state(local, make_module, paths)
    except RankRefusedError as error:
        raise EngineStateError(f"the weights cannot be gathered in {folder}: {error}") from error
    finally:
        # Mapped tensors stay valid after their files are removed.
        shutil.rmtree(parts)


class _Recorder:
    """The ``TraceRecorder`` of all ranks. Each rank writes a separate file into the same folder."""

    def __init__(self, local: TraceRecorder, team: RankTeam) -> None:
        self._local = local
        self._team = team

    def start(self, call: StartProfile) -> Path:
        folder = self._local.start(call)
        self._team.together(StartTrace(call.prefix, call.with_stack, call.use_gzip), lambda: None)
        return folder

    def stop(self) -> Path:
        """Stop the recording on all ranks and return the file of rank 0."""
        path, _ = self._team.together(StopTrace(), self._local.stop)
        return path
