"""The state that a heartbeat tells."""

from __future__ import annotations

import os

import msgspec

from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import EngineHeartbeat
from penstock.shared.messages.core import SchedulerStats
from penstock.shared.messages.supervision import EngineState
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.worker_config import WorkerConfig
from penstock.worker.processes.progress import Phase, ProgressReader, ProgressWriter
from penstock.worker.serving.core.stall import StallWatch
from penstock.worker.serving.reporting.heartbeat import Heartbeat


class Recorder(CommandConnection):
    """Recorder that keeps written heartbeats instead of writing them."""

    def __init__(self) -> None:
        super().__init__("redis://nowhere")
        self.beats: list[EngineHeartbeat] = []

    async def execute(self, *arguments: object, **_: object) -> object:
        if arguments[0] == "SET":
            assert isinstance(arguments[2], bytes)
            self.beats.append(msgspec.json.decode(arguments[2], type=EngineHeartbeat))
        return None


CONFIG = WorkerConfig(worker_id="w", engine_id="w-0", redis_url="", engine=EngineConfig(model="m"))


async def beat(heartbeat: Heartbeat, recorder: Recorder) -> EngineHeartbeat:
    await heartbeat.beat()
    return recorder.beats.pop()


async def test_without_a_core_the_heartbeat_has_the_configuration() -> None:
    recorder = Recorder()
    heartbeat = Heartbeat(CONFIG, recorder)
    heartbeat.state = EngineState.DRAINING
    assert (await beat(heartbeat, recorder)).state == EngineState.DRAINING


async def test_the_heartbeat_includes_the_core_s_progress() -> None:
    recorder = Recorder()
    heartbeat = Heartbeat(CONFIG, recorder)
    reader = ProgressReader()
    writer = ProgressWriter(os.dup(reader.fd))
    reader.close()
    now = 0.0
    watch = StallWatch(reader, 10.0, lambda: 0.0, clock=lambda: now)
    heartbeat.watch(reader, watch)

    async def state() -> EngineState:
        return (await beat(heartbeat, recorder)).state

    assert await state() == EngineState.STARTING
    with writer.compiling():
        assert await state() == EngineState.COMPILING
    heartbeat.state = EngineState.READY
    writer.enter(Phase.IDLE)
    assert await state() == EngineState.READY
    writer.take_message(1)
    writer.enter(Phase.STEPPING)
    assert await state() == EngineState.BUSY
    with writer.compiling():
        assert await state() == EngineState.COMPILING
    for _ in range(13):
        now += 0.5
        assert watch.check() is None
    assert await state() == EngineState.STALLED
    writer.end_step(1)
    watch.check()
    heartbeat.stats = SchedulerStats(num_running_reqs=1, device_memory_bytes=5)
    beats = await beat(heartbeat, recorder)
    assert (beats.state, beats.step_counter, beats.device_memory_bytes) == (EngineState.BUSY, 1, 5)
    writer.end_step(0)
    heartbeat.state = EngineState.DRAINING
    assert await state() == EngineState.DRAINING
