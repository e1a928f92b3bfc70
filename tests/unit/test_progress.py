"""The block of memory in which a core shows its progress."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from penstock.worker.processes.progress import Phase, Progress, ProgressReader, ProgressWriter


@pytest.fixture
def reader() -> Iterator[ProgressReader]:
    reader = ProgressReader()
    yield reader
    reader.close()


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 10
        return self.now_ns


@pytest.fixture
def writer(reader: ProgressReader) -> ProgressWriter:
    return ProgressWriter(os.dup(reader.fd), Clock())


def test_before_the_core_runs_it_is_starting(reader: ProgressReader) -> None:
    assert reader.read() == Progress(phase=Phase.STARTING)


def test_the_reader_gets_the_written_values(reader: ProgressReader, writer: ProgressWriter) -> None:
    assert reader.read() == Progress(phase=Phase.STARTING, phase_entered_ns=10)
    writer.take_message(3)
    writer.enter(Phase.STEPPING)
    writer.end_step(2)
    writer.end_step(1)
    assert reader.read() == Progress(
        phase=Phase.STEPPING,
        phase_entered_ns=20,
        step_ended_ns=40,
        step_counter=2,
        num_unfinished_reqs=1,
        num_messages_taken=1,
    )


def test_compiling_returns_to_the_phase_before_it_whatever_happens(
    reader: ProgressReader, writer: ProgressWriter
) -> None:
    def fail() -> None:
        with writer.compiling(), writer.compiling():
            assert reader.read().phase is Phase.COMPILING
            raise RuntimeError("no kernel")

    writer.enter(Phase.STEPPING)
    with pytest.raises(RuntimeError, match="no kernel"):
        fail()
    assert reader.read().phase is Phase.STEPPING


def test_reading_works_after_both_sides_closed_the_descriptor(reader: ProgressReader, writer: ProgressWriter) -> None:
    reader.close()
    reader.close()
    writer.end_step(0)
    assert reader.read().step_counter == 1


def test_an_engine_without_a_worker_process_shares_no_progress() -> None:
    ProgressWriter().end_step(0)


def test_a_file_that_is_no_progress_block_is_refused() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, 64)
    with pytest.raises(ValueError, match="not contain a progress block"):
        ProgressWriter(fd)
