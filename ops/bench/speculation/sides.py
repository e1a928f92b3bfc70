"""Who answers, each once as it is and once with guesses from the text."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..engines.sides import EngineAlone, PeerScript, Side, vllm_environment

NUM_RIVAL_GUESSES = 5  # vLLM's documentation has 5 with its n-gram
LLAMA_GUESSES = 10  # the default of llama-cpp-python's prompt lookup


class Pair(NamedTuple):
    """One engine without and with guesses; ``is_batching`` says whether it answers many at once."""

    name: str
    off: Side
    on: Side
    is_batching: bool = True


class _Engine(EngineAlone):
    """Our engine with a value of ``--speculative``."""

    def __init__(self, speculative: str, options: list[str]) -> None:
        super().__init__([*options, "--speculative", speculative])
        self.name = f"Penstock, {speculative}"


def ours(speculative: str, engine_options: list[str]) -> Pair:
    """Our engine alone, without Redis; ``speculative`` as of ``worker start``."""
    return Pair(f"Penstock, {speculative}", _Engine("off", engine_options), _Engine(speculative, engine_options))


def rivals(peers: frozenset[str], peers_folder: Path) -> list[Pair]:
    """vLLM's n-gram, and the prompt lookup of llama.cpp's Python package."""
    pairs = []
    if "vllm" in peers:
        folder = peers_folder.absolute() / "vllm"
        off, on = (
            PeerScript(name, "vllm_offline.py", folder, lambda: vllm_environment(folder), options)
            for name, options in (
                ("vLLM offline, off", ()),
                ("vLLM offline, ngram", ("--num-guesses", str(NUM_RIVAL_GUESSES))),
            )
        )
        pairs.append(Pair("vLLM offline, ngram", off, on))
    if "llama" in peers:
        folder = peers_folder.absolute() / "llama"
        off, on = (
            PeerScript(name, "llama_lookup.py", folder, options=options)
            for name, options in (
                ("llama.cpp, off", ()),
                ("llama.cpp, prompt lookup", ("--num-guesses", str(LLAMA_GUESSES))),
            )
        )
        pairs.append(Pair("llama.cpp, prompt lookup", off, on, is_batching=False))
    return pairs
