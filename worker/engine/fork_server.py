"""``python -m penstock.worker.engine.fork_server``: imports torch and transformers once, and forks engine cores.

The imports are most of a core's start, and cores that were forked share their memory. The server itself has one
thread, touches no device and serves no request. Its cores outlive it. It ends when its standard input does, which
its supervisor holds, and its last core has.

A core is killed when the connection that asked for it ends: the worker process that wanted it is gone, and no one
else may kill it without the danger of hitting a stranger with the same process id.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import selectors
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec
import structlog

from ...shared.log import add_log_arguments, configure_logging
from ..forked_child import be_child
from ..forking import FORK_VERSION, NUM_DESCRIPTORS, CoreExited, ForkAnswer, ForkCore, Forked, NotForked
from ..ipc import FrameSplitter, frame

_READ_BYTES = 1 << 16
# How long the next core of an engine waits for its last one, which was killed, to be gone and its memory with it.
_PREDECESSOR_TIMEOUT_S = 5.0
_CUDA_NOT_INITIALIZED = 3

log = structlog.get_logger(__name__)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ForkCore)


@dataclass(eq=False)
class _Connection:
    """A worker process, and its core once it has one."""

    socket: socket.socket
    splitter: FrameSplitter = field(default_factory=FrameSplitter)
    descriptors: list[int] = field(default_factory=list)
    request: ForkCore | None = None
    pid: int = 0
    pidfd: int = -1

    def answer(self, answer: ForkAnswer, descriptors: list[int] | None = None) -> None:
        # A worker process that is gone is noticed by the end of its stream.
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.socket, [frame(_encoder.encode(answer))], descriptors or [])

    def close_descriptors(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []


class ForkServer:
    """Answers worker processes on ``listener`` until ``lifeline`` ends and no core is left.

    Args:
        listener: a listening Unix stream socket.
        lifeline: a descriptor whose end means that nobody will ask any more.
        refusal: why nothing can be forked; empty if it can.
    """

    def __init__(self, listener: socket.socket, lifeline: int, refusal: str = "") -> None:
        self._listener: socket.socket | None = listener
        self._lifeline = lifeline
        self._refusal = refusal
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(lifeline, selectors.EVENT_READ, self._end_lifeline)
        self._connections: set[_Connection] = set()

    def run(self) -> None:
        """Serve until there is nothing left to serve."""
        while self._listener is not None or any(connection.pid for connection in self._connections):
            for key, _ in self._selector.select():
                key.data()

    def _accept(self) -> None:
        assert self._listener is not None
        accepted, _ = self._listener.accept()
        connection = _Connection(accepted)
        self._connections.add(connection)
        self._selector.register(accepted, selectors.EVENT_READ, lambda: self._read(connection))

    def _end_lifeline(self) -> None:
        self._selector.unregister(self._lifeline)
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _read(self, connection: _Connection) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(connection.socket, _READ_BYTES, NUM_DESCRIPTORS)
        except ConnectionResetError:
            data, descriptors = b"", []
        connection.descriptors += descriptors
        if not data:
            self._lose(connection)
            return
        for payload in connection.splitter.feed(data):
            self._take(connection, payload)

    def _lose(self, connection: _Connection) -> None:
        """Its worker process is gone, or has what it wanted: what it asked for is not wanted any more."""
        self._selector.unregister(connection.socket)
        connection.socket.close()
        connection.close_descriptors()
        if connection.pid:
            os.kill(connection.pid, signal.SIGKILL)  # it has not been waited for, so the id is still its own
        else:
            self._connections.discard(connection)

    def _take(self, connection: _Connection, payload: bytes) -> None:
        try:
            request = _decoder.decode(payload)
        except msgspec.DecodeError as error:
            connection.answer(NotForked(f"the fork server cannot read what it is asked for: {error}"))
            return
        refusal = self._refusal
        if request.version != FORK_VERSION:
            refusal = f"the fork server speaks version {FORK_VERSION}, this worker process {request.version}"
        elif len(connection.descriptors) != NUM_DESCRIPTORS:
            refusal = f"the fork server got {len(connection.descriptors)} descriptors of {NUM_DESCRIPTORS}"
        elif connection.request is not None:
            refusal = "a connection is for one core"
        if not refusal and not self._end_predecessors(request.engine_id):
            refusal = "the engine's last core does not end"
        if refusal:
            connection.answer(NotForked(refusal))
        else:
            connection.request = request
            self._fork(connection, request)
        connection.close_descriptors()

    def _end_predecessors(self, engine_id: str) -> bool:
        """Kill what is left of an engine's earlier lives; False if one hangs in the kernel."""
        for connection in list(self._connections):
            if connection.request is None or connection.request.engine_id != engine_id or not connection.pid:
                continue
            os.kill(connection.pid, signal.SIGKILL)
            with selectors.DefaultSelector() as ending:
                ending.register(connection.pidfd, selectors.EVENT_READ)
                if not ending.select(_PREDECESSOR_TIMEOUT_S):
                    return False
            self._bury(connection)
        return True

    def _fork(self, connection: _Connection, request: ForkCore) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            be_child(partial(self._become_core, request, connection.descriptors))
        connection.pid = pid
        connection.pidfd = os.pidfd_open(pid)
        connection.answer(Forked(pid), [connection.pidfd])
        self._selector.register(connection.pidfd, selectors.EVENT_READ, lambda: self._bury(connection))

    def _bury(self, connection: _Connection) -> None:
        _, status = os.waitpid(connection.pid, 0)
        self._selector.unregister(connection.pidfd)
        os.close(connection.pidfd)
        connection.pid, connection.pidfd = 0, -1
        if connection.socket.fileno() < 0:
            self._connections.discard(connection)
        else:
            connection.answer(CoreExited(os.waitstatus_to_exitcode(status)))

    def _become_core(self, request: ForkCore, descriptors: list[int]) -> int:
        """In the child: let go of everything that is the server's, and be what a started core is."""
        kept = [os.dup(descriptor) for descriptor in descriptors]
        self._let_go()
        os.setsid()
        os.chdir(request.folder)
        os.environ.clear()
        os.environb.update(request.environment)
        sys.path[:] = request.module_paths
        channel, progress, trace, out, err = kept
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (out, 1), (err, 2)):
            os.dup2(source, target)
            os.close(source)
        _name_process(f"core {request.engine_id.rpartition('-')[2]}")
        from .__main__ import run

        inherited = ["--fd", str(channel), "--progress-fd", str(progress), "--trace-fd", str(trace)]
        return run([*inherited, *request.log_options])

    def _let_go(self) -> None:
        """Close what only the server may hold: an end of a stream is seen when its last holder has gone."""
        self._selector.close()
        if self._listener is not None:
            self._listener.close()
        for connection in self._connections:
            connection.socket.close()
            connection.close_descriptors()
            if connection.pidfd >= 0:
                os.close(connection.pidfd)


def preload(folder: str) -> str:
    """Import what cores are made of; return why they cannot be forked from here, or nothing.

    Args:
        folder: of the model that they will load, whose architecture is imported as well; empty if it is not known.
    """
    # Asking the driver whether there is a GPU would start CUDA, which no fork survives; NVML answers without.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # One thread here: what holds a lock while another forks holds it in the child for ever.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        from . import composition  # noqa: F401  # for its imports
        from .structured import loader  # noqa: F401  # as above
    except Exception as error:
        # The core says the same in its own words when it is started the ordinary way.
        return f"the engine cannot be imported: {type(error).__name__}: {error}"
    if folder:
        _preload_architecture(folder)
    if _has_started_cuda():
        return "something that the engine imports has started CUDA, which does not survive a fork"
    return ""


def _preload_architecture(folder: str) -> None:
    """Import a model's modelling code, and what transformers computes when it loads its first model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder)
        _ = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        # Hundreds of regular expressions, of all architectures; 5.17 has them elsewhere.
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping(config.model_type)
    except Exception as error:  # a broken folder raises anything; the core says what it is
        log.debug("architecture_not_preloaded", folder=folder, error=str(error))


def _has_started_cuda() -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    context = ctypes.c_void_p()
    return driver.cuCtxGetCurrent(ctypes.byref(context)) != _CUDA_NOT_INITIALIZED


def _name_process(name: str) -> None:
    """What ``ps`` and ``top`` show; a name of more than 15 bytes is cut."""
    with suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(name)


def main() -> None:
    """Serve on the inherited socket."""
    parser = argparse.ArgumentParser(prog="penstock.worker.engine.fork_server", description=__doc__)
    parser.add_argument("--listen-fd", type=int, required=True, help="file descriptor of the listening Unix socket")
    add_log_arguments(parser)
    parser.add_argument("--model", default="", help="folder of a model whose architecture is imported, too")
    options = parser.parse_args()
    configure_logging(options.log_level, options.log_format)
    # Whoever stops a whole process group means the supervisor: cores may still be finishing what runs.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    refusal = preload(options.model)
    # What is here now stays, and its pages stay shared: no collector of a child writes into them.
    gc.collect()
    gc.freeze()
    _name_process("fork server")
    ForkServer(socket.socket(fileno=options.listen_fd), sys.stdin.fileno(), refusal).run()


if __name__ == "__main__":
    main()
    # Nothing here wants to be taken down in order, and libraries complain when they are, unused.
    os._exit(0)
