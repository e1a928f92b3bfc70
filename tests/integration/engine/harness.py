"""Random models, requests and engine core processes for the tests of this folder."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import transformers
from transformers.models.gpt_neox.configuration_gpt_neox import GPTNeoXConfig

from penstock.shared.control.calls import CallError, Utility, UtilityAnswer
from penstock.shared.messages.core import (
    Configure,
    CoreOutput,
    EngineCoreOutput,
    EngineCoreOutputs,
    Hello,
    UtilityCall,
    UtilityOutput,
)
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.composition import Engine
from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.processes.forking import ChildExited, ForkAnswer, Forked
from penstock.worker.processes.ipc import FrameSplitter, frame, socket_pair
from penstock.worker.processes.process_tree import Lifeline
from penstock.worker.processes.progress import ProgressReader
from penstock.worker.serving.core.process import Launch
from penstock.worker.supervisor.fork_server import FORK_SERVER_VARIABLE

VOCAB_SIZE = 128
LONG_PROMPT = list(range(5, 45))
# 4 layers x 2 KV heads x 16 dims x key and value x 4 bytes.
BYTES_PER_TOKEN = 1024

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Wide enough that outputs vary and the two best tokens lie far apart.
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
QWEN3_EXPERTS: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
# Large enough that linear layers are packed.
LARGE: dict[str, Any] = {**SHAPE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
# Without it, GptOssConfig has one for 131,072 positions, whose cache has two million blocks to check after each step.
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
MODELS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, sliding_window=7),
    "gemma2": lambda: transformers.Gemma2Config(
        **SHAPE, head_dim=16, query_pre_attn_scalar=16, sliding_window=9, attn_logit_softcapping=20.0
    ),
    "phi3": lambda: transformers.Phi3Config(**SHAPE),
    "gpt_neox": lambda: GPTNeoXConfig(**SHAPE),
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SHAPE, **QWEN3_EXPERTS),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SHAPE, head_dim=16, sliding_window=8, num_local_experts=4, num_experts_per_tok=2, rope_parameters=YARN
    ),
}


def request(request_id: str, prompt: list[int], output: list[int] | None = None, **params: Any) -> EngineCoreRequest:
    """A request for 30 greedy tokens unless ``params`` says otherwise."""
    given: dict[str, Any] = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, **params}
    return EngineCoreRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling_params=SamplingParams(**given), output_token_ids=output
    )


def generate(core: EngineCore, requests: list[EngineCoreRequest]) -> dict[str, list[int]]:
    """Run requests together to their end; the tokens of each."""
    tokens: dict[str, list[int]] = {r.request_id: [] for r in requests}
    for r in requests:
        assert core.add_request(r) is None
    while core.has_work:
        for output in core.step_fn():
            assert output.error is None
            tokens[output.request_id] += output.new_token_ids
        core.check_invariants()
    return tokens


class ForkedProcess:
    """An engine core that the tests' fork server has made of itself, with as much of ``Popen`` as is used here.

    Args:
        channel: its end of the socket.
        errors: where its standard error goes, and the traceback of its end.
    """

    def __init__(self, channel: int, errors: int) -> None:
        self.returncode: int | None = None
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.settimeout(240)  # more than a start takes on a busy machine
        self._server.connect(os.environ[FORK_SERVER_VARIABLE])
        self._splitter = FrameSplitter()
        self._answers: list[ForkAnswer] = []
        self._progress = ProgressReader()
        self._lifeline = Lifeline()
        launch = Launch(
            engine_id=f"test-{uuid.uuid4().hex}",
            visible_devices=None,
            log_options=(),
            channel=channel,
            progress=self._progress.fd,
            trace=errors,
            lifeline=self._lifeline.reader,
            module="penstock.worker.engine",
        )
        payload = frame(msgspec.msgpack.encode(launch.request()))
        descriptors = [*launch.inherited, errors, errors]
        self._server.sendall(payload[socket.send_fds(self._server, [payload], descriptors) :])
        self._pidfd = -1
        forked = self._answer()
        assert isinstance(forked, Forked), forked
        self.pid = forked.pid

    def send_signal(self, number: int) -> None:
        """ProcessLookupError if it has ended; its descriptor names it even when its id is another's."""
        signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 120) -> int:
        """Its exit status; TimeoutError if it does not end."""
        if self.returncode is None:
            self._server.settimeout(timeout)
            ended = self._answer()
            assert isinstance(ended, ChildExited), ended
            self.returncode = ended.returncode
            self._server.close()
            self._progress.close()
            self._lifeline.close()
            os.close(self._pidfd)
        return self.returncode

    def _answer(self) -> ForkAnswer:
        while not self._answers:
            data, descriptors, _, _ = socket.recv_fds(self._server, 1 << 12, 1)
            if descriptors:
                (self._pidfd,) = descriptors
            assert data, "the fork server is gone"
            self._answers += [msgspec.msgpack.decode(payload, type=ForkAnswer) for payload in self._splitter.feed(data)]
        return self._answers.pop(0)


class CoreProcess:
    """An engine core in a process of its own, and the worker's end of its socket."""

    def __init__(self) -> None:
        self.socket, theirs = socket_pair()
        self._errors = os.memfd_create("errors")
        self.process = ForkedProcess(theirs.fileno(), self._errors)
        theirs.close()
        self.socket.settimeout(240)  # more than a start takes on a busy machine
        self._splitter = FrameSplitter()
        self._decoder = msgspec.msgpack.Decoder(CoreOutput)
        self._messages: list[Any] = []
        self._last_words = ""

    def send(self, message: Any) -> None:
        self.socket.sendall(frame(message if isinstance(message, bytes) else msgspec.msgpack.encode(message)))

    def receive(self) -> Any:
        """The next message; EOFError, with the core's last words, when it is gone."""
        while not self._messages:
            data = self.socket.recv(1 << 16)
            if not data:
                words = self.close()
                raise EOFError(f"the core ended with {self.process.returncode}: {words[-3000:]}")
            self._messages += [self._decoder.decode(payload) for payload in self._splitter.feed(data)]
        return self._messages.pop(0)

    def start(self, config_json: bytes) -> Any:
        """Shake hands; returns ``Ready`` or ``StartupFailed``."""
        assert isinstance(self.receive(), Hello)
        self.send(Configure(config_json))
        return self.receive()

    def collect(self, num_ended: int) -> dict[str, list[EngineCoreOutput]]:
        """Receive until that many requests have ended; the outputs of each."""
        outputs: dict[str, list[EngineCoreOutput]] = {}
        while sum(rows[-1].finished for rows in outputs.values()) < num_ended:
            message = self.receive()
            assert isinstance(message, EngineCoreOutputs)
            for output in message.outputs:
                outputs.setdefault(output.request_id, []).append(output)
        return outputs

    def call(self, utility: Utility, call_id: int = 1) -> UtilityOutput:
        """Ask, and pass over the outputs of steps."""
        self.send(UtilityCall(call_id, utility))
        return self.answer()

    def answer(self) -> UtilityOutput:
        """The next answer to a call."""
        while not isinstance(message := self.receive(), UtilityOutput):
            assert isinstance(message, EngineCoreOutputs)
        return message

    def close(self) -> str:
        """End the process; returns what it wrote to standard error."""
        self.socket.close()
        self.process.wait()
        if self._errors >= 0:
            self._last_words = os.pread(self._errors, 1 << 20, 0).decode()
            os.close(self._errors)
            self._errors = -1
        return self._last_words


def run(core: EngineCore, requests: list[EngineCoreRequest]) -> dict[str, EngineCoreOutput]:
    """Run requests together to their end; everything that each was given."""
    wholes = {r.request_id: EngineCoreOutput(r.request_id) for r in requests}
    for r in requests:
        assert core.add_request(r) is None
    while core.has_work:
        for output in core.step_fn():
            assert output.error is None
            whole = wholes[output.request_id]
            whole.new_token_ids = whole.new_token_ids + output.new_token_ids
            whole.new_logprobs = whole.new_logprobs + output.new_logprobs
            whole.finish_reason, whole.stop_reason = output.finish_reason, output.stop_reason
    core.check_invariants()
    return wholes


# At token 5 it waits, once, until whoever has it opens its gate.
GATED_MODEL = """
from transformers import LlamaForCausalLM

class GatedLlamaForCausalLM(LlamaForCausalLM):
    has_waited = False

    def forward(self, input_ids=None, **kwargs):
        if not self.has_waited and (input_ids == 5).any():
            self.has_waited = True
            with open({path!r}) as gate:  # a named pipe
                gate.read()
        return super().forward(input_ids=input_ids, **kwargs)
"""


class Gate:
    """A gate that stops a model in the middle of a step, however fast or slow the machine is."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._writer: int | None = None

    def await_arrival(self) -> None:
        """Wait until a core stands at it."""
        give_up_at = time.monotonic() + 100
        while self._writer is None:
            try:
                self._writer = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                assert time.monotonic() < give_up_at, "nobody came to the gate"
                time.sleep(0.001)

    def open(self) -> None:
        """Let it pass."""
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None


def write_model_with_code(folder: Path, base: Path, name: str, code: str) -> Path:
    """A copy of a model whose class is ``name``, defined by ``code``; for ``trust_remote_code``."""
    shutil.copytree(base, folder)
    (folder / "modeling_own.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [name]
    config["auto_map"] = {"AutoModelForCausalLM": f"modeling_own.{name}"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_gated_model(folder: Path, base: Path, gate: Gate) -> Path:
    """A copy of a llama that stands still at ``gate`` when it first meets token 5."""
    return write_model_with_code(folder, base, "GatedLlamaForCausalLM", GATED_MODEL.format(path=str(gate.path)))


MakeEngine = Callable[..., Engine]


def _answer(engine: Engine, call: Utility) -> UtilityOutput:
    while (output := engine.control.answer(UtilityCall(1, call))) is None:
        assert not engine.core.step_fn()
    return output


def ask(engine: Engine, call: Utility) -> UtilityAnswer:
    """The answer to a call that succeeds."""
    output = _answer(engine, call)
    assert output.error is None, output.error
    assert output.answer is not None
    return output.answer


def refusal(engine: Engine, call: Utility) -> CallError:
    """The error of a call that fails."""
    output = _answer(engine, call)
    assert output.answer is None
    assert output.error is not None
    return output.error


def tokens(engine: Engine, **params: Any) -> list[int]:
    """Return what the engine makes of one prompt of 40 tokens; 30 greedy tokens unless ``params`` says otherwise."""
    return generate(engine.core, [request("r", LONG_PROMPT, **params)])["r"]
