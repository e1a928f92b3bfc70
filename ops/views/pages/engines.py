"""Engines of all models: state, load and last error, with actions to put them to sleep, drain and stop."""

from __future__ import annotations

from typing import Any

from ....producer.client_parts.core import CallOptions
from ....producer.control.secret_keys import Role
from ....shared.deployment.orders import read_drains
from ....shared.deployment.records import DeviceUse, EngineHeartbeat, EngineSetup
from ....shared.errors import ValidationError
from ....shared.messages.requests import EXACT
from ....shared.messages.supervision import EngineState
from ....shared.params.lora import LoraSetup
from ..access import Access
from ..page import Action, ActionContext, Page, PageSection, Params, View, field_of
from ..source import PageSnapshot
from .devices import read_devices_view

CALL_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 30.0
_LIGHTS = {
    EngineState.READY: "good",
    EngineState.BUSY: "good",
    EngineState.DEAD: "bad",
    EngineState.FAILED: "bad",
    EngineState.STALLED: "bad",
}


async def _read_engines(snapshot: PageSnapshot, params: Params, _: Access) -> View:
    model = params.get("model", "")
    engines = [engine for engine in await snapshot.engines() if model in ("", engine.model)]
    workers = sorted({engine.worker_id for engine in engines})
    return {
        "rows": [_engine_row(engine) for engine in engines],
        "workers": {
            worker: [engine.engine_id for engine in engines if engine.worker_id == worker] for worker in workers
        },
        "drains": read_drains(engines, snapshot.at),
        "now": snapshot.at,
        "devices": await read_devices_view(snapshot),
        "facts": {"engines": len(engines)},
    }


def _engine_row(engine: EngineHeartbeat) -> dict[str, Any]:
    stats = engine.stats
    step = stats.step_time_s if stats is not None and stats.step_time_s.count else None
    use = engine.device_use or DeviceUse()
    return {
        "engine": engine.engine_id,
        "model": engine.model,
        "state": engine.state.value,
        "state_words": engine.state_words,
        "light": _LIGHTS.get(engine.state, "warn"),
        "worker": engine.worker_id,
        "host": engine.host,
        "device": engine.device,
        "running": engine.num_running_reqs,
        "waiting_inside": engine.num_waiting_reqs,
        "kv_cache_usage": engine.kv_cache_usage,
        "tokens_per_s": engine.tokens_per_s,
        "steps": engine.step_counter,
        "step_p50_s": step and step.quantile(0.5),
        "step_mean_s": step and step.sum / step.count,
        "core_memory_bytes": engine.core_rss_bytes,
        "device_memory_bytes": engine.device_memory_bytes,
        "gpu_busy_share": use.busy_share,
        "gpu_used_bytes": use.used_bytes,
        "gpu_total_bytes": use.total_bytes,
        "gpu_power_w": use.power_w,
        "gpu_temperature_c": use.temperature_c,
        "restarts": engine.num_restarts,
        "restart_at": engine.restart_at or None,
        "started_at": engine.started_at,
        "error": engine.error,
        "name": engine.engine_name,
        "setup": setup_facts(engine.setup) | _adapters(engine.lora_digests) | _version(engine.weights_version),
    }


def setup_facts(setup: EngineSetup | None) -> dict[str, str]:
    """Return an engine's start options for people, without those that have their usual values."""
    if setup is None:
        return {}
    switches = {
        "prefix caching": setup.enable_prefix_caching,
        "async scheduling": setup.async_scheduling,
        "deterministic": setup.deterministic,
        "native kernels": setup.native_kernels,
    }
    facts = {
        "engine": setup.engine if setup.engine != "penstock" else "",
        "resumes": setup.resume if setup.resume != EXACT else "",
        "longest": f"{setup.max_model_len} tokens",
        "batch": f"{setup.max_num_seqs} requests, {setup.max_num_batched_tokens} tokens a step",
        "KV cache": f"{setup.kv_cache_size_tokens} tokens in blocks of {setup.block_size}, {setup.kv_cache_dtype}",
        "policy": setup.scheduling_policy,
        "weights": f"{setup.dtype}, {setup.quantization}" if setup.quantization else setup.dtype,
        "attention": setup.attention_backend,
        "structured outputs": setup.structured_outputs_backend,
        "adapters": _adapter_capacity(setup.lora) if setup.lora is not None else "",
        "speculation": f"{setup.speculative}, in {setup.num_free_rows} rows a step" if setup.num_free_rows else "",
        "ranks": "" if setup.ranks is None else setup.ranks.describe(),
        "on": ", ".join(name for name, is_on in switches.items() if is_on),
        "processor": setup.processor,
        "instructions": " ".join(setup.instructions),
        "versions": ", ".join(f"{name} {version}" for name, version in setup.versions.items()),
    }
    return {name: value for name, value in facts.items() if value}


def _adapters(digests: list[str]) -> dict[str, str]:
    return {"adapters loaded": str(len(digests))} if digests else {}


def _version(version: str) -> dict[str, str]:
    return {"version of the weights": version} if version else {}


def _adapter_capacity(lora: LoraSetup) -> str:
    return f"{lora.max_loras} in a batch, {lora.max_cpu_loras} in memory, of rank {lora.max_lora_rank} at most"


async def _sleep_engine(context: ActionContext) -> str:
    engine_id = field_of(context.form, "engine")
    await context.source.client.sleep(1, mode="keep", **_call_options(context, engine_id))
    return f"{engine_id} sleeps; its requests are queued again and resume after their last tokens"


async def _wake_engine(context: ActionContext) -> str:
    engine_id = field_of(context.form, "engine")
    await context.source.client.wake_up(**_call_options(context, engine_id))
    return f"{engine_id} is awake"


async def _drain_worker(context: ActionContext) -> str:
    source, worker_id = context.source, field_of(context.form, "worker")
    await source.operations.drain_worker(worker_id, DRAIN_TIMEOUT_S)
    return (
        f"worker {worker_id} is draining: it claims no more requests, and leaves when the running ones have ended, "
        f"after {DRAIN_TIMEOUT_S:.0f} s at the latest"
    )


async def _stop_worker(context: ActionContext) -> str:
    source, worker_id = context.source, field_of(context.form, "worker")
    await source.operations.stop_worker(worker_id)
    return f"worker {worker_id} is stopping; other engines resume its requests, or they wait for one"


async def _scale_worker(context: ActionContext) -> str:
    worker_id, text = field_of(context.form, "worker"), field_of(context.form, "engines")
    if not text.isdecimal():
        raise ValidationError(f"engines must be a number of at least 1, got {text!r}")
    await context.source.operations.scale_worker(worker_id, int(text))
    return f"worker {worker_id} changes to {text} engines; surplus engines finish their requests first"


def _call_options(context: ActionContext, engine_id: str) -> CallOptions:
    return CallOptions(engine_id=engine_id, model=field_of(context.form, "of"), timeout_s=CALL_TIMEOUT_S)


SECTION = PageSection(
    pages=(Page("engines", "/engines", "Engines", _read_engines, query=("model",), nav="Engines"),),
    actions=(
        Action("/engines/sleep", Role.OPERATOR, _sleep_engine, "engines"),
        Action("/engines/wake", Role.OPERATOR, _wake_engine, "engines"),
        Action("/workers/scale", Role.OPERATOR, _scale_worker, "engines"),
        Action("/workers/drain", Role.OPERATOR, _drain_worker, "engines"),
        Action("/workers/stop", Role.OPERATOR, _stop_worker, "engines", confirm="worker"),
    ),
)
