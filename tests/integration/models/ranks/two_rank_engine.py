"""An engine of two ranks over the two processes of a test: rank 0 has the core, rank 1 follows it.

All of it is the engine's own but the start and the end of the processes, which are there already.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from penstock.ops.lab.survey import trial
from penstock.ops.lab.survey.outcome import SAME
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine import composition
from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.engine.core.in_flight import PipelinedCore
from penstock.worker.engine.ranks.follower import Follower
from penstock.worker.engine.ranks.messages import RankAnswer, RankChannel, RankCommand, RunStep, StopRank
from penstock.worker.engine.ranks.one import OneRank
from penstock.worker.engine.ranks.sharded_forward import sharded_forward
from penstock.worker.engine.scheduling.batches import StagedBatches
from penstock.worker.engine.scheduling.scheduler_output import SchedulerOutput
from penstock.worker.models.loaded import LoadedModel
from penstock.worker.models.loading.loader import load_model
from penstock.worker.models.parallel.groups import RankGroups

from ...engine.harness import BYTES_PER_TOKEN, generate, request


def loading_once() -> Callable[[EngineConfig, Path, RankGroups], LoadedModel]:
    """``load_model`` for engines of one model, one after the other: each has what the first has loaded."""
    loaded: list[LoadedModel] = []

    def load(config: EngineConfig, folder: Path, groups: RankGroups) -> LoadedModel:
        if not loaded:
            loaded.append(load_model(config, folder, groups))
        return loaded[0]

    return load


def channel_of(path: str, kind: Any) -> RankChannel:
    """A socket between the ranks: rank 0 listens at ``path``, and both call this."""
    with socket.socket(socket.AF_UNIX) as listener:
        if dist.get_rank() == 0:
            listener.bind(path)
            listener.listen()
        dist.barrier()
        if dist.get_rank() == 0:
            return RankChannel(listener.accept()[0], kind)
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(path)
        return RankChannel(connected, kind)


class Team:
    """The used part of ``RankTeam``, for one process that this one has not started."""

    def __init__(self, channel: RankChannel) -> None:
        self._channel = channel

    def send(self, command: Any) -> None:
        self._channel.send(command)

    def together(self, command: Any, act: Callable[[], Any]) -> tuple[Any, list[Any]]:
        self.send(command)
        return act(), [self._channel.receive(60)]

    compute = together

    def loss(self, error: BaseException) -> BaseException:
        return error


class TwoRanks(OneRank):
    """The ``Ranks`` of an engine whose other rank is at ``path``: there is one for each engine.

    Args:
        load_part: loads the part of rank 0.
    """

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        groups: RankGroups,
        path: str,
        load_part: Callable[[EngineConfig, Path, RankGroups], LoadedModel] = load_model,
    ) -> None:
        super().__init__(config, folder)
        self._groups = groups
        self._channel = channel_of(path, RankAnswer)
        self._load_part = load_part

    def load(self, report: Callable[[], None]) -> LoadedModel:
        part = self._load_part(self._config, self._folder, self._groups)
        team: Any = Team(self._channel)
        chosen = self._config.max_model_len
        self._model = dataclasses.replace(
            part,
            forward=sharded_forward(part.forward, team),
            max_model_len=chosen or part.max_model_len,
            is_length_chosen=chosen is not None,
        )
        return self._model

    def close(self) -> None:
        self._channel.send(StopRank())
        self._channel.close()


def serve_stages(
    folder: str, groups: RankGroups, meeting: str, prompts: list[list[int]], tokens: list[list[int]]
) -> dict[str, Any]:
    """Run the survey's comparison through engines that keep two batches in flight, and resume half of each request."""
    paths = iter(f"{meeting}-{number}" for number in range(4))
    if groups.rank:
        for path in paths:
            follow(folder, groups, path)
        return {}
    expectation = trial.Expectation(prompts, tokens)
    composition.make_ranks = lambda config, path: TwoRanks(config, path, groups, next(paths))
    launch, most = StagedBatches.launch, [0]

    def watched(self: StagedBatches, launched: SchedulerOutput) -> None:
        launch(self, launched)
        names = [request.request_id for batch in self.batches for request in batch.requests]
        assert len(set(names)) == len(names), "batches share a request"
        most[0] = max(most[0], len(self))

    StagedBatches.launch = watched  # pyright: ignore[reportAttributeAccessIssue]
    try:
        part: Any = SimpleNamespace(bytes_per_token=BYTES_PER_TOKEN // 4, bytes_per_request=0)  # one layer of four
        told = trial.compare(Path(folder), expectation, part, pipeline_parallel_size=2)
        with closing(trial.build_whole(Path(folder), pipeline_parallel_size=2)) as engine:
            told["resumed"] = resume(engine.core, expectation)
    finally:
        StagedBatches.launch = launch
    return {"told": told, "most": most[0]}


def two_in_flight(folder: str, groups: RankGroups, meeting: str, prompts: list[list[int]]) -> dict[str, Any]:
    """Hold the second stage in the first batch until the first stage has computed another one.

    Nothing of this is a matter of time: with one batch at a time they would wait for each other until a collective
    gives up.
    """
    flag = torch.zeros(1)
    if groups.rank:
        follow(folder, groups, meeting, lambda: dist.recv(flag, 0))
        return {}
    composition.make_ranks = lambda config, path: TwoRanks(config, path, groups, meeting)
    with closing(trial.build_whole(Path(folder), pipeline_parallel_size=2)) as engine:
        core = engine.core
        assert isinstance(core, PipelinedCore)
        for index, prompt in enumerate(prompts):
            core.add_request(request(str(index), prompt, max_tokens=trial.NUM_NEW_TOKENS))
        outputs = [core.step_fn(), core.step_fn()]
        flying = [[request.request_id for request in batch.requests] for batch in core._stages.batches]
        dist.send(flag, 1)  # which returns when the second stage stands in the middle of the first batch
        landed = [output.request_id for output in core.step_fn()]
        while core.has_work:
            core.step_fn()
        core.check_invariants()
        return {"outputs": outputs, "flying": flying, "landed": landed}


def resume(core: EngineCore, expectation: trial.Expectation) -> str:
    """Go on behind half of the tokens of each prompt."""
    half = expectation.num_new_tokens // 2
    asked = [
        request(str(index), prompt, tokens[:half], max_tokens=expectation.num_new_tokens)
        for index, (prompt, tokens) in enumerate(zip(expectation.prompts, expectation.tokens, strict=True))
    ]
    found = generate(core, asked)
    return SAME if all(found[str(i)] == tokens[half:] for i, tokens in enumerate(expectation.tokens)) else "differs"


def follow(
    folder: str,
    groups: RankGroups,
    path: str,
    hold: Callable[[], object] | None = None,
    load_part: Callable[[EngineConfig, Path, RankGroups], LoadedModel] = load_model,
) -> None:
    """Be rank 1 of the engine at ``path`` until it ends.

    Args:
        hold: called once, when a batch has come to this stage that may not be the only one.
        load_part: loads the part of rank 1.
    """
    channel = channel_of(path, RankCommand)
    config = EngineConfig(model=folder, max_model_len=trial.MAX_MODEL_LEN, num_threads=1)
    model = load_part(config, Path(folder), groups)
    follower = Follower(config, model, groups.rank, Path(folder), lambda _: model.weights)
    network: Any = model.network
    while not isinstance(command := channel.receive(), StopRank):
        if hold is not None and isinstance(command, RunStep) and command.is_started:
            network.run_layers = held_once(network, hold)
            hold = None
        answer = follower.do(command)
        if answer is not None:
            channel.send(answer)
    channel.close()


def held_once(network: Any, hold: Callable[[], object]) -> Callable[..., Any]:
    """Build what is called with the rows that the stage before has made."""
    run_layers = network.run_layers

    def held(*rows: Any, **named: Any) -> Any:
        del network.run_layers
        hold()
        return run_layers(*rows, **named)

    return held
