"""Tries a model in two engines of a data-parallel group: each has a half of the experts, and requests of its own."""

from __future__ import annotations

import multiprocessing
import socket
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from ....worker.config.data_parallel import RankPlace
from . import trial
from .child import first_line
from .outcome import SAME

SIZE = 2
# Engines of one ``trial.compare`` at most, one after the other; each connects its ranks again.
_NUM_ENGINES = 4
_TIMEOUT_S = 60.0


def compare_grouped(folder: Path, expectation: trial.Expectation) -> dict[str, str]:
    """Run ``trial.compare`` on both ranks concurrently, each with all prompts, and return differences at any rank.

    Raises:
        UnsuitableModelError: a rank could not compute the model.
    """
    addresses = _free_addresses(_NUM_ENGINES)
    files = [folder / f"rank-{rank}.json" for rank in range(SIZE)]
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_be_rank, args=(rank, addresses, folder, expectation, result), daemon=True)
        for rank, result in enumerate(files)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    results: dict[str, str] = {}
    for file in files:
        of_rank = msgspec.json.decode(file.read_bytes()) if file.is_file() else {"": "its process died"}
        if "" in of_rank:
            raise trial.UnsuitableModelError(of_rank[""])
        results = {way: result if results.get(way, SAME) == SAME else results[way] for way, result in of_rank.items()}
    return results


def _be_rank(rank: int, addresses: list[str], folder: Path, expectation: trial.Expectation, result: Path) -> None:
    places = (
        RankPlace(generation=number, rank=rank, size=SIZE, address=address, timeout_s=_TIMEOUT_S)
        for number, address in enumerate(addresses, 1)
    )

    def run(folder: Path, batches: list[list[list[int]]], **options: Any) -> trial.Generated:
        if dist.is_initialized():
            dist.destroy_process_group()
        return trial.run_engine(folder, batches, data_parallel_size=SIZE, place=next(places), **options)

    try:
        # Sizes of a model with all experts, whose caches are as large.
        outcome = trial.compare(folder, expectation, trial.load(folder).forward, run)
    except Exception as error:  # whatever an architecture's own code raises
        outcome = {"": first_line(error)}
    result.write_bytes(msgspec.json.encode(outcome))


def _free_addresses(count: int) -> list[str]:
    """Return free addresses. Another process could take them before rank 0 listens, which is unlikely."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
    finally:
        for probe in probes:
            probe.close()
