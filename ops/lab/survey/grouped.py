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
# Of ``trial.compare`` at most, one behind the other; each finds its other rank anew.
_NUM_ENGINES = 4
_TIMEOUT_S = 60.0


def compare_grouped(folder: Path, expectation: trial.Expectation) -> dict[str, str]:
    """``trial.compare`` by both ranks at once, each with all prompts; what differs at any of them.

    Raises:
        UnsuitableModelError: a rank could not compute it; says why.
    """
    addresses = _free_addresses(_NUM_ENGINES)
    results = [folder / f"rank-{rank}.json" for rank in range(SIZE)]
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_be_rank, args=(rank, addresses, folder, expectation, result), daemon=True)
        for rank, result in enumerate(results)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    told: dict[str, str] = {}
    for result in results:
        found = msgspec.json.decode(result.read_bytes()) if result.is_file() else {"": "its process died"}
        if "" in found:
            raise trial.UnsuitableModelError(found[""])
        told = {way: said if told.get(way, SAME) == SAME else told[way] for way, said in found.items()}
    return told


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
        # Of one that has all experts, whose caches are as large.
        found = trial.compare(folder, expectation, trial.load(folder).forward, run)
    except Exception as error:  # whatever an architecture's own code raises
        found = {"": first_line(error)}
    result.write_bytes(msgspec.json.encode(found))


def _free_addresses(count: int) -> list[str]:
    """Nobody else takes them between now and the moment at which rank 0 listens, if luck will have it."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
    finally:
        for probe in probes:
            probe.close()
