"""Append messages that ``wire_v1.json`` does not hold yet. Run by hand when a message is added."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from penstock.producer.webhooks.events import (
    EventFamily,
    EventState,
    WebhookAttempt,
    WebhookEvent,
    WebhookSecret,
    WebhookTarget,
)
from penstock.shared.control.calls import CallError, ControlCommand, ControlReply, Utility, UtilityAnswer
from penstock.shared.control.engine import (
    CheckInvariants,
    CollectiveRpc,
    DummyBatchDone,
    ExecuteDummyBatch,
    InputCacheReset,
    Invariants,
    IsSleeping,
    PrefixCacheReset,
    ProfileSaved,
    ProfileStarted,
    ResetInputCache,
    ResetPrefixCache,
    RpcResult,
    Sleep,
    SleepState,
    StartProfile,
    StopProfile,
    WakeUp,
)
from penstock.shared.control.model import (
    AddLora,
    Detokenize,
    DetokenizedText,
    GetTokenizer,
    ListLoras,
    LoraChanged,
    LoraList,
    PinLora,
    ReloadWeights,
    RemoveLora,
    SaveShardedState,
    ShardedStateSaved,
    Tokenize,
    TokenizedText,
    TokenizerFile,
    WeightsReloaded,
)
from penstock.shared.messages.core import (
    AbortRequests,
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    LeaveWave,
    RankSetup,
    Ready,
    SchedulerStats,
    StartWave,
    UtilityCall,
    UtilityOutput,
    WavePhase,
    WaveStarted,
    WaveState,
)
from penstock.shared.messages.deltas import Delta, SegmentEnd
from penstock.shared.messages.outcome import FinishReason, RequestError, TokenLogprobs, Usage
from penstock.shared.messages.requests import EngineCoreRequest, InputChunk
from penstock.shared.messages.supervision import (
    CancelCommand,
    DrainCommand,
    ModelAction,
    ModelCommand,
    ScaleCommand,
    StopCommand,
)
from penstock.shared.params.images import ImageInput
from penstock.shared.params.lora import LoRARequest, LoraSetup
from penstock.shared.params.pooling import Pooled, PoolingParams
from penstock.shared.params.prompts import PromptEmbeds, Tokenization
from penstock.shared.params.sampling import RepetitionDetectionParams, SamplingParams
from penstock.shared.stats import ImageStats, KVOffloadStats, RequestStats, StepStats
from penstock.worker.fleet.backend import AgentPhase, AgentSpec, AgentStatus

PATH = Path(__file__).parent / "wire_v1.json"

SAMPLES: list[tuple[str, str, Any]] = [
    (
        "request with text",
        "EngineCoreRequest",
        EngineCoreRequest(
            request_id="r1",
            prompt="four plus two is",
            sampling_params=SamplingParams(temperature=0.5, top_p=0.9, seed=7, stop=["."], max_tokens=12),
            arrival_time=1.5,
            model="demo",
            tenant="acme",
            priority=-3,
        ),
    ),
    (
        "request with a deadline",
        "EngineCoreRequest",
        EngineCoreRequest(
            request_id="r4",
            prompt="hi",
            sampling_params=SamplingParams(),
            tenant="acme",
            deadline=1795.5,
            band="batch",
        ),
    ),
    (
        "request with messages",
        "EngineCoreRequest",
        EngineCoreRequest(
            request_id="r2", messages=[{"role": "user", "content": "hi"}], sampling_params=SamplingParams()
        ),
    ),
    (
        "resumed request to a core",
        "CoreInput",
        EngineCoreRequest(
            request_id="r3#2",
            prompt_token_ids=[1, 2, 3],
            output_token_ids=[9],
            sampling_params=SamplingParams(),
            epoch=2,
            attempt=2,
        ),
    ),
    ("abort", "CoreInput", AbortRequests(["r1#1", "r2#1"])),
    ("utility call", "CoreInput", UtilityCall(4, CheckInvariants())),
    ("reset of the prefix cache", "CoreInput", UtilityCall(5, ResetPrefixCache())),
    (
        "step outputs",
        "CoreOutput",
        EngineCoreOutputs(
            outputs=[EngineCoreOutput("r1#1", [5, 6]), EngineCoreOutput("r2#1", [7], FinishReason.STOP, 7)],
            scheduler_stats=SchedulerStats(num_running_reqs=2, step_counter=9),
            timestamp=2.5,
        ),
    ),
    (
        "ready",
        "CoreOutput",
        Ready(
            model_folder="/m",
            architecture="LlamaForCausalLM",
            max_model_len=2048,
            num_blocks=10,
            block_size=16,
            dtype="float32",
            device="cpu",
            vocab_size=400,
            eos_token_ids=[2],
        ),
    ),
    ("delta", "Delta", Delta(index=3, token_ids=[5, 6], text="ab")),
    (
        "last delta",
        "Delta",
        Delta(index=5, token_ids=[7], text="c", finish_reason=FinishReason.STOP, stop_reason=".", usage=Usage(4, 6, 0)),
    ),
    (
        "failed delta",
        "Delta",
        Delta(index=0, finish_reason=FinishReason.ERROR, error=RequestError("prompt_too_long", "too long")),
    ),
    (
        "request with penalties and log probabilities",
        "EngineCoreRequest",
        EngineCoreRequest(
            request_id="r4",
            prompt="spell 7:",
            sampling_params=SamplingParams(
                presence_penalty=0.5, frequency_penalty=-0.25, repetition_penalty=1.5, logprobs=2, seed=7
            ),
        ),
    ),
    (
        "step outputs with log probabilities",
        "CoreOutput",
        EngineCoreOutputs(
            outputs=[EngineCoreOutput("r1#1", [5], new_logprobs=[TokenLogprobs(5, -0.5, 1, [(5, -0.5), (9, -1.25)])])]
        ),
    ),
    (
        "delta with log probabilities",
        "Delta",
        Delta(index=3, token_ids=[5, 6], text="ab", logprobs=[TokenLogprobs(t, -2.5, 7, [(1, -0.5)]) for t in (5, 6)]),
    ),
    (
        "request with rules for its tokens",
        "CoreInput",
        EngineCoreRequest(
            request_id="r5#1",
            prompt_token_ids=[1, 2, 3],
            sampling_params=SamplingParams(
                logit_bias={7: -1.5, 300: 100.0},
                allowed_token_ids=[7, 300],
                bad_words=["six"],
                thinking_token_budget=64,
                repetition_detection=RepetitionDetectionParams(max_pattern_size=8, min_pattern_size=2, min_count=3),
                bad_words_token_ids=[[5], [6, 7]],
                think_token_ids=(8, 9),
                prompt_logprobs=2,
            ),
        ),
    ),
    (
        "step outputs with log probabilities of a prompt",
        "CoreOutput",
        EngineCoreOutputs(
            outputs=[EngineCoreOutput("r1#1", [5], new_prompt_logprobs=[TokenLogprobs(2, -0.5, 1, [(2, -0.5)])])]
        ),
    ),
    (
        "delta with log probabilities of a prompt",
        "Delta",
        Delta(token_ids=[5], text="ab", prompt_logprobs=[TokenLogprobs(t, -2.5, 7, [(1, -0.5)]) for t in (2, 3)]),
    ),
    (
        "step outputs with statistics",
        "CoreOutput",
        EngineCoreOutputs(
            outputs=[EngineCoreOutput("r1#1", [5], events=[EngineCoreEvent(EngineCoreEventType.SCHEDULED, 7.25)])],
            step_stats=StepStats(3, 1, 10, 2, 0.25, 0.5, 0.125),
        ),
    ),
    (
        "last delta with statistics",
        "Delta",
        Delta(index=5, finish_reason=FinishReason.STOP, stats=RequestStats(0.5, 0.25, 1.5, 0.75, 0.375, 2.25, 1, 2)),
    ),
    (
        "resumable request",
        "EngineCoreRequest",
        EngineCoreRequest(request_id="r6", prompt="hi", sampling_params=SamplingParams(seed=1), resumable=True),
    ),
    ("chunk of text", "InputChunk", InputChunk(prompt=" and then?")),
    ("chunk of token ids", "InputChunk", InputChunk(prompt_token_ids=[5, 6])),
    (
        "request with its own tokenization",
        "EngineCoreRequest",
        EngineCoreRequest(
            request_id="r8",
            prompt="hi",
            sampling_params=SamplingParams(truncate_prompt_tokens=4),
            tokenization=Tokenization(truncate_prompt_tokens=4, add_special_tokens=False, truncation_side="right"),
        ),
    ),
    (
        "pooling request that keeps what the model takes",
        "EngineCoreRequest",
        EngineCoreRequest(request_id="r9", prompt="hi", pooling_params=PoolingParams(truncate_prompt_tokens=-1)),
    ),
    (
        "request that wants logits processors",
        "EngineCoreRequest",
        EngineCoreRequest(
            request_id="r10",
            prompt="hi",
            sampling_params=SamplingParams(extra_args={"logits_processors": {"ban": {"token_ids": [5]}}}),
        ),
    ),
    (
        "chunk with parameters of its own",
        "InputChunk",
        InputChunk(prompt=" and then?", sampling_params=SamplingParams(seed=3, max_tokens=4)),
    ),
    (
        "delta that ends a segment",
        "Delta",
        Delta(
            index=3, token_ids=[5], text="a", usage=Usage(4, 4), segment_ends=[SegmentEnd(0, 4, FinishReason.STOP, ".")]
        ),
    ),
    (
        "request with prompt embeddings",
        "CoreInput",
        EngineCoreRequest(
            request_id="r7#1",
            sampling_params=SamplingParams(),
            prompt_embeds=PromptEmbeds("bfloat16", (2, 1), b"\x80?\x00@"),
        ),
    ),
    (
        "request to pool a pair",
        "CoreInput",
        EngineCoreRequest(
            request_id="r9#1",
            prompt_token_ids=[2, 7, 3, 8, 3],
            pooling_params=PoolingParams(task="classify", use_activation=False, prompt_name="query"),
            second_text_at=3,
        ),
    ),
    (
        "request with a prediction",
        "CoreInput",
        EngineCoreRequest(
            request_id="r10#1",
            prompt_token_ids=[2, 7],
            sampling_params=SamplingParams(),
            prediction="as before",
            draft_token_ids=[8, 9],
        ),
    ),
    (
        "delta with the usage of a prediction",
        "Delta",
        Delta(index=1, token_ids=[8], finish_reason=FinishReason.STOP, usage=Usage(2, 2, 0, 1, 1)),
    ),
    (
        "delta with a pooled result",
        "Delta",
        Delta(finish_reason=FinishReason.STOP, usage=Usage(5, 0), pooled=Pooled(data=b"\x00\x00\x80?", shape=(1,))),
    ),
    (
        "request of a trace, with an adapter",
        "EngineCoreRequest",
        EngineCoreRequest(
            request_id="r8",
            prompt="hi",
            sampling_params=SamplingParams(),
            lora_request=LoRARequest("cats", 3, "/adapters/cats"),
            trace_headers={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
        ),
    ),
    ("cancel command", "EngineCommand", CancelCommand("r1")),
    ("drain command", "WorkerCommand", DrainCommand(5.0)),
    ("stop command", "WorkerCommand", StopCommand()),
    ("scale command", "WorkerCommand", ScaleCommand(3)),
    ("failed utility call", "CoreOutput", UtilityOutput(5, CallError("engine_state", "it sleeps"))),
    (
        "failed control call",
        "ControlReply",
        ControlReply(call_id="c1", engine_id="h-1-0", error=CallError("engine_state", "it sleeps")),
    ),
]
_CALLS: list[Utility] = [
    CheckInvariants(),
    ResetPrefixCache(),
    Sleep(),
    Sleep(level=2, mode="wait", drain_timeout_s=7.5),
    WakeUp(),
    WakeUp(["weights"]),
    IsSleeping(),
    StartProfile(),
    StopProfile(),
    SaveShardedState("/models/new", "w-{part}.safetensors", 1 << 30),
    CollectiveRpc("device_info", 1.5, [1, "a"], {"k": [None]}),
    ExecuteDummyBatch(),
    Tokenize(prompt="a", add_special_tokens=False),
    Tokenize(messages=[{"role": "user", "content": "a"}], chat_template_kwargs={"k": 1}, has_pieces=True),
    Detokenize([1, 2]),
    ResetPrefixCache(reset_running_requests=True),
    ResetInputCache("encoder"),
    GetTokenizer(),
    AddLora(LoRARequest("cats", 3, "/adapters/cats")),
    RemoveLora(3),
    ListLoras(),
    PinLora(3),
    PinLora(3, pinned=False),
    ReloadWeights(path="/models/new", version="v2", mode="keep", drain_timeout_s=5.0, only_check=True),
    StartProfile("run-", with_stack=True, use_gzip=True),
]
_ANSWERS: list[UtilityAnswer] = [
    Invariants(7, 8, 1, 2),
    PrefixCacheReset(True),
    SleepState(),
    SleepState(2, ["weights", "kv_cache"]),
    ProfileStarted("/data/profiles"),
    ProfileSaved("/data/profiles/a.json", 1000),
    ShardedStateSaved("/models/new", ["w-0.safetensors"], 1000),
    RpcResult({"device": "cpu"}),
    DummyBatchDone(0.25),
    TokenizedText([1, 2], 2048, [b"a", b"\xe2"]),
    DetokenizedText("a"),
    InputCacheReset(0),
    TokenizerFile(b"x"),
    LoraChanged(True),
    LoraList([3, 7]),
    WeightsReloaded(path="/models/new", version="v2", former_version="v1", load_time_s=1.5),
    SleepState(2, ["weights", "kv_cache"], is_unloaded=True),
]
# Fields that a core on a GPU always sends.
OF_A_GPU: dict[str, Any] = {
    "model_folder": "/m",
    "architecture": "LlamaForCausalLM",
    "max_model_len": 2048,
    "num_blocks": 10,
    "block_size": 16,
    "dtype": "bfloat16",
    "device": "cuda",
    "vocab_size": 400,
    "eos_token_ids": [2],
}
SAMPLES += [
    (
        "ready with what attends",
        "CoreOutput",
        Ready(
            **OF_A_GPU,
            attention_backend="triton",
            kv_cache_dtype="fp8_e4m3",
        ),
    ),
    (
        "ready with instructions",
        "CoreOutput",
        Ready(
            model_folder="/m",
            architecture="LlamaForCausalLM",
            max_model_len=2048,
            num_blocks=10,
            block_size=16,
            dtype="bfloat16",
            device="cpu",
            vocab_size=400,
            eos_token_ids=[2],
            kernel_instructions="amx",
        ),
    ),
    (
        "ready with logits processors",
        "CoreOutput",
        Ready(
            model_folder="/m",
            architecture="LlamaForCausalLM",
            max_model_len=2048,
            num_blocks=10,
            block_size=16,
            dtype="bfloat16",
            device="cpu",
            vocab_size=400,
            eos_token_ids=[2],
            logits_processors=("ban",),
        ),
    ),
]
SAMPLES += [
    (f"control call {i}", "EngineCommand", ControlCommand(call_id="c1", call=call, expires_at_ms=1795290000000))
    for i, call in enumerate(_CALLS)
]
SAMPLES += [
    (f"control answer {i}", "ControlReply", ControlReply(call_id="c1", engine_id="h-1-0", answer=answer))
    for i, answer in enumerate(_ANSWERS)
]
SAMPLES += [
    (
        "delta with texts of tokens",
        "Delta",
        Delta(
            token_ids=[5],
            text="b",
            logprobs=[TokenLogprobs(5, -2.5, 2, [(1, -0.5)], [b"b", b"\xe2\x82"])],
            prompt_logprobs=[TokenLogprobs(3, -2.5, 7, [], [b"a"])],
            first_prompt_token=(2, b"<s>"),
        ),
    ),
]
# These are JSON in Redis, which has the same names and defaults.
SAMPLES += [
    (
        "webhook target",
        "WebhookTarget",
        WebhookTarget(url="https://example.com/hook", tenant="acme", model="demo", family=EventFamily.RESPONSE),
    ),
    (
        "webhook secret in rotation",
        "WebhookSecret",
        WebhookSecret(tenant="acme", current="whsec_bmV3", created_at=2.5, previous="whsec_b2xk", previous_until=9.5),
    ),
    (
        "webhook event given up",
        "WebhookEvent",
        WebhookEvent(
            event_id="evt_1",
            type="request.completed",
            url="https://example.com/hook",
            tenant="acme",
            created_at=1.5,
            body="{}",
            state=EventState.DEAD,
            num_attempts=1,
            attempts=[WebhookAttempt(at=2.5, duration_s=0.25, status=410, error="status 410")],
        ),
    ),
]
SAMPLES += [
    (
        "request that demands an exact resume",
        "EngineCoreRequest",
        EngineCoreRequest(
            request_id="r",
            prompt_token_ids=[1, 2],
            sampling_params=SamplingParams(max_tokens=3, seed=1),
            resume="exact",
        ),
    ),
    (
        "ready of another engine",
        "CoreOutput",
        Ready(
            **OF_A_GPU,
            engine="vllm",
            resume="greedy",
            versions={"vllm": "0.32.0"},
            quantization="awq",
            scheduling_policy="priority",
            enable_prefix_caching=True,
            async_scheduling=True,
            structured_outputs_backend="auto",
        ),
    ),
    (
        "step outputs of an engine that keeps KV blocks",
        "CoreOutput",
        EngineCoreOutputs(
            scheduler_stats=SchedulerStats(kv_offload=KVOffloadStats(64, 32, 4096, 8192, 1, 2, 1 << 20, 1 << 30)),
            timestamp=2.5,
        ),
    ),
]
SAMPLES += [
    (
        "request with an adapter and its digest",
        "CoreInput",
        EngineCoreRequest(
            request_id="r",
            prompt_token_ids=[1, 2],
            sampling_params=SamplingParams(max_tokens=3, seed=1),
            lora_request=LoRARequest("cats", 3, "/adapters/cats", digest="0123456789abcdef" * 4),
        ),
    ),
    (
        "ready of an engine that serves adapters",
        "CoreOutput",
        Ready(**OF_A_GPU, lora=LoraSetup(max_loras=8, max_lora_rank=64, max_cpu_loras=32)),
    ),
    (
        "outputs that tell which adapters are loaded",
        "CoreOutput",
        EngineCoreOutputs(timestamp=2.5, lora_digests=["0123456789abcdef" * 4]),
    ),
    ("outputs that tell that no adapter is loaded", "CoreOutput", EngineCoreOutputs(timestamp=2.5, lora_digests=[])),
    ("ready with guesses", "CoreOutput", Ready(**OF_A_GPU, speculative="ngram:8", num_free_rows=64)),
]
SAMPLES += [
    ("ready with the version of its weights", "CoreOutput", Ready(**OF_A_GPU, weights_version="1f0a9c3b55d2")),
    (
        "delta that begins on weights of a version",
        "Delta",
        Delta(index=7, token_ids=[5], text="ab", weights_version="2026-11-23"),
    ),
]
SAMPLES += [
    (
        "request with images",
        "EngineCoreRequest",
        EngineCoreRequest(
            request_id="r",
            prompt="<image><image> what is this",
            sampling_params=SamplingParams(max_tokens=3, seed=1),
            images=[ImageInput("ab" * 32), ImageInput.from_bytes(b"an image")],
        ),
    ),
    (
        "step outputs of a prompt with images",
        "CoreOutput",
        EngineCoreOutputs(outputs=[EngineCoreOutput("r1#1", [5], num_prompt_tokens=580)]),
    ),
    (
        "step outputs of an engine that reads images",
        "CoreOutput",
        EngineCoreOutputs(scheduler_stats=SchedulerStats(images=ImageStats(5, 3, 2, 1 << 20)), timestamp=2.5),
    ),
    ("ready of a model that reads images", "CoreOutput", Ready(**OF_A_GPU, max_images=8)),
    ("ready of one that reads none", "CoreOutput", Ready(**OF_A_GPU, image_refusal="this model reads no images")),
]
SAMPLES += [
    (
        "specification of an agent",
        "AgentSpec",
        AgentSpec(worker_name="demo-ray-0", options={"PENSTOCK_MODEL": "/m"}, grace_s=1.5),
    ),
    (
        "status of an agent whose worker has ended",
        "AgentStatus",
        AgentStatus(
            worker_name="demo-ray-0",
            host="h",
            agent_pid=1,
            pid=2,
            phase=AgentPhase.ENDED,
            exit_status=-9,
            last_words=["error: it fell over"],
        ),
    ),
    (
        "ready of several ranks",
        "CoreOutput",
        Ready(
            **OF_A_GPU,
            ranks=RankSetup(
                tensor_parallel_size=2,
                pipeline_parallel_size=2,
                enable_expert_parallel=True,
                pids=[7, 8, 9, 10],
                weight_bytes=[1 << 30] * 4,
                kv_cache_bytes=[1 << 31] * 4,
            ),
        ),
    ),
    ("start wave", "CoreInput", StartWave(7)),
    ("leave wave", "CoreInput", LeaveWave()),
    (
        "step outputs of a rank",
        "CoreOutput",
        EngineCoreOutputs(scheduler_stats=SchedulerStats(wave=WaveState(7, WavePhase.STARTING)), timestamp=2.5),
    ),
    ("delta of a chat that thinks", "Delta", Delta(token_ids=[5], text="b", begins_in_reasoning=False)),
    ("delta with the prompt counted", "Delta", Delta(token_ids=[5], text="b", prompt_usage=Usage(9, 0, 4))),
    ("ready of a rank", "CoreOutput", Ready(**OF_A_GPU, num_shared_experts=64)),
    ("model command", "WorkerCommand", ModelCommand("m", ModelAction.PIN)),
    ("wave started", "WaveStarted", WaveStarted(1_763_931_000_000_000, 7)),
]


def main() -> None:
    """Append new messages; recorded ones stay unchanged."""
    recorded = json.loads(PATH.read_text()) if PATH.exists() else []
    names = {entry["name"] for entry in recorded}
    for name, decode_as, message in SAMPLES:
        if name not in names:
            fields = {field: msgspec.to_builtins(getattr(message, field)) for field in message.__struct_fields__}
            data = msgspec.msgpack.encode(message).hex()
            recorded.append(
                {"name": name, "decode_as": decode_as, "type": type(message).__name__, "hex": data, "fields": fields}
            )
    PATH.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
