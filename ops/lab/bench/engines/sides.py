"""The sides that run the workload: our engine alone, our whole stack, and rivals; each in its own processes."""

from __future__ import annotations

import asyncio
import ctypes.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from .....shared.errors import ConfigurationError
from ....local.stack import LocalStack
from ..peers.peer_run import tree_memory
from ..result import SideRun
from ..workload import Phase, write_workload
from .served import run_served

ALONE, SERVED = "Penstock, engine alone", "Penstock through Redis"
VLLM_SERVED = "vLLM under Penstock"
ALONE_DETERMINISTIC = "Penstock, engine alone, deterministic"
ALONE_INT8, ALONE_INT4 = "Penstock, engine alone, int8", "Penstock, engine alone, int4"
ALONE_MIXED = "Penstock, engine alone, int4-mixed"
VLLM_OFFLINE, VLLM_ASYNC, VLLM_HTTP = "vLLM offline", "vLLM in-process async", "vLLM HTTP server"
STATIC, CONTINUOUS = "transformers static", "transformers continuous"
LLAMA = "llama.cpp"
LLAMA_Q8, LLAMA_Q4_K, LLAMA_Q4 = "llama.cpp, Q8_0", "llama.cpp, Q4_K_M", "llama.cpp, Q4_0"
RUN_TIMEOUT_S = 1800.0
# In a rival's folder once all of it is there and could be imported.
INSTALLED_MARK = ".installed"
_SCRIPTS = Path(__file__).parents[1] / "peers"
_MAX_WORDS_CHARS = 1500


class Side(Protocol):
    """An implementation of the workload.

    ``precision`` selects the tolerance for its tokens; empty for that of the dtype.
    """

    name: str
    precision: str

    @property
    def why_missing(self) -> str:
        """Why it cannot run here; empty if it can."""
        ...

    def run(self, model: Path, phases: list[Phase], dtype: str, scratch: Path) -> SideRun:
        """Start, do the phases in turn, stop.

        Raises:
            ConfigurationError: it failed; the message has its own last words.
        """
        ...


class EngineAlone:
    """An engine core without Redis; ``options`` are those of ``worker start``."""

    precision = ""
    why_missing = ""

    def __init__(self, options: list[str], name: str = ALONE) -> None:
        self._options, self.name = options, name

    def run(self, model: Path, phases: list[Phase], dtype: str, scratch: Path) -> SideRun:
        command = [sys.executable, "-m", "penstock.worker.engine.offline", "--model", str(model), "--dtype", dtype]
        return run_script([*command, *self._options, *_room(phases)], phases, scratch)


class EngineAloneQuantized(EngineAlone):
    """The same with weights in bytes or four bits, which need the compiled kernels."""

    def __init__(self, name: str, quantization: str, options: list[str]) -> None:
        super().__init__([*options, "--quantization", quantization], name)
        self.precision = quantization

    @property
    def why_missing(self) -> str:
        has_compiler = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
        return "" if has_compiler else "no C++ compiler"


class ThroughRedis:
    """A private Redis, `worker start` and one client; ``options`` are those of ``worker start``."""

    name = SERVED
    precision = ""
    why_missing = ""

    def __init__(self, options: list[str]) -> None:
        self._options = options

    def run(self, model: Path, phases: list[Phase], dtype: str, scratch: Path) -> SideRun:
        options = ["--log-level", "warning", "--device", "cpu", "--dtype", dtype, *self._options, *_room(phases)]
        with LocalStack(model, options) as stack:
            results = asyncio.run(run_served(stack.url, phases))
            rss_bytes, peak_rss_bytes = tree_memory([stack.workers[0].pid, stack.redis_pid()])
            return SideRun(
                ready_s=stack.ready_time_s, rss_bytes=rss_bytes, peak_rss_bytes=peak_rss_bytes, phases=results
            )


class VllmThroughRedis(ThroughRedis):
    """The same with vLLM's engine, configured as vLLM recommends.

    Args:
        folder: environment of ``install_peers``; ``make engine-vllm`` adds the parts of Penstock that its core needs.
    """

    name = VLLM_SERVED

    def __init__(self, options: list[str], folder: Path) -> None:
        python = str(folder / "bin" / "python")
        own = ["--engine", "vllm", "--engine-python", python, "--max-model-len", "512"]
        # It compiles at its start. A compilation in a step on a busy machine must not look like a stall.
        super().__init__([*options, *own, "--stall-timeout", "60"])
        self._folder, self._python = folder, python

    @property
    def why_missing(self) -> str:
        if not (self._folder / INSTALLED_MARK).exists():
            return "not installed"
        command = [self._python, "-m", "penstock.worker.other_engines.vllm.versions"]
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
        return "" if completed.returncode == 0 else "no penstock in its environment (make engine-vllm)"

    def run(self, model: Path, phases: list[Phase], dtype: str, scratch: Path) -> SideRun:
        # As the rival's script has it: the check in float32 is not timed.
        eager = ["--enforce-eager"] if dtype == "float32" else []
        with _environment(vllm_environment(self._folder)):
            return ThroughRedis([*self._options, *eager]).run(model, phases, dtype, scratch)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Have processes that are started inside see ``variables``."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class PeerScript:
    """A script of ``peers`` in a rival's environment.

    Args:
        folder: environment of ``install_peers``; None for our own environment.
        environment: variables in addition to our own.
        options: options of the script.
        precision: as in ``Side``.
    """

    def __init__(
        self,
        name: str,
        script: str,
        folder: Path | None = None,
        environment: Callable[[], Mapping[str, str]] = dict,
        options: tuple[str, ...] = (),
        precision: str = "",
    ) -> None:
        self.name = name
        self.precision = precision
        self._script = _SCRIPTS / script
        self._folder = folder
        self._environment = environment
        self._options = options

    @property
    def why_missing(self) -> str:
        is_here = self._folder is None or (self._folder / INSTALLED_MARK).exists()
        return "" if is_here else "not installed"

    def run(self, model: Path, phases: list[Phase], dtype: str, scratch: Path) -> SideRun:
        python = sys.executable if self._folder is None else str(self._folder / "bin" / "python")
        command = [python, str(self._script), "--model", str(model), "--dtype", dtype]
        command += ["--spawned-at", repr(time.monotonic()), *self._options]
        return run_script(command, phases, scratch, self._environment())


def choose_sides(peers: frozenset[str], peers_folder: Path, engine_options: list[str]) -> list[Side]:
    """Ours, and the rivals of ``peers`` ("vllm", "transformers", "llama"), installed in ``peers_folder`` or not.

    transformers is the one that we run with ourselves.
    """
    peers_folder = peers_folder.absolute()
    sides: list[Side] = [EngineAlone(engine_options)]
    sides.append(EngineAlone([*engine_options, "--deterministic"], ALONE_DETERMINISTIC))
    sides += [
        EngineAloneQuantized(name, quantization, engine_options)
        for name, quantization in ((ALONE_INT8, "int8"), (ALONE_MIXED, "int4-mixed"), (ALONE_INT4, "int4"))
    ]
    sides.append(ThroughRedis(engine_options))
    if "vllm" in peers:
        folder = peers_folder / "vllm"
        scripts = {VLLM_OFFLINE: "vllm_offline.py", VLLM_ASYNC: "vllm_async.py", VLLM_HTTP: "vllm_http.py"}
        sides += [PeerScript(name, file, folder, lambda: vllm_environment(folder)) for name, file in scripts.items()]
    if "transformers" in peers:
        sides.append(PeerScript(STATIC, "transformers_static.py"))
        sides.append(PeerScript(CONTINUOUS, "transformers_continuous.py"))
    if "llama" in peers:
        for name, file_type, precision in (
            (LLAMA, "", ""),
            (LLAMA_Q8, "Q8_0", "int8"),
            (LLAMA_Q4_K, "Q4_K_M", "int4-mixed"),
            (LLAMA_Q4, "Q4_0", "int4"),
        ):
            options = ("--file-type", file_type) if file_type else ()
            folder = peers_folder / "llama"
            sides.append(PeerScript(name, "llama_batch.py", folder, options=options, precision=precision))
    return sides


def named_sides(sides: list[Side], names: list[str]) -> list[Side]:
    """Return the sides with ``names``; all if ``names`` is empty.

    Raises:
        ConfigurationError: no side has a name; the message lists the sides.
    """
    by_name = {side.name: side for side in sides}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ConfigurationError(f"--sides has {unknown[0]!r}; choose from {'; '.join(by_name)}")
    return [by_name[name] for name in names] or sides


def adapter_sides(peers_folder: Path, engine_options: list[str]) -> list[Side]:
    """Return the sides of the row adapter: our stack with either engine, and vLLM's own server."""
    folder = peers_folder.absolute() / "vllm"
    return [
        ThroughRedis(engine_options),
        VllmThroughRedis([option for option in engine_options if option == "--no-enable-prefix-caching"], folder),
        PeerScript(VLLM_HTTP, "vllm_http.py", folder, lambda: vllm_environment(folder)),
    ]


def vllm_environment(folder: Path) -> dict[str, str]:
    """Return the recommended variables: all cores (the default leaves one idle), and two preloaded libraries."""
    cores = sorted(os.sched_getaffinity(0))
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    preloaded = [str(path) for path in vllm_libraries(folder).values() if path]
    return variables | ({"LD_PRELOAD": ":".join(preloaded)} if preloaded else {})


def vllm_libraries(folder: Path) -> dict[str, str]:
    """Return the paths of the libraries that vLLM recommends to preload; "" for one that was not found."""
    openmp = next(folder.rglob("libiomp5.so"), None) if folder.exists() else None
    allocator = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
    return {"tcmalloc": allocator or "", "libiomp5": str(openmp or "")}


def run_script(
    command: list[str], phases: list[Phase], scratch: Path, environment: Mapping[str, str] | None = None
) -> SideRun:
    """Run a command that takes ``--workload`` and ``--output``.

    Raises:
        ConfigurationError: it failed or took too long; the message has its last words.
    """
    workload, output = scratch / "workload.json", scratch / "output.json"
    write_workload(phases, workload)
    output.unlink(missing_ok=True)
    command = [*command, "--workload", str(workload), "--output", str(output)]
    with (scratch / "words.txt").open("w+") as words:
        # A session of its own, so that its whole family can be ended.
        process = subprocess.Popen(
            command,
            stdout=words,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            process.wait(RUN_TIMEOUT_S)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise ConfigurationError(f"it did not end within {RUN_TIMEOUT_S:g} s") from None
            raise
        words.seek(0)
        printed = words.read().strip()
    if process.returncode != 0 or not output.exists():
        raise ConfigurationError(f"it ended with {process.returncode}: {printed[-_MAX_WORDS_CHARS:]}")
    return msgspec.json.decode(output.read_bytes(), type=SideRun)


def _room(phases: list[Phase]) -> list[str]:
    return ["--max-num-seqs", str(max(phase.concurrency for phase in phases))]
