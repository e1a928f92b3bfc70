"""Real models whose KV blocks outlive the engine: the same tokens, and nothing read that another one has computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from structlog.testing import capture_logs

from penstock.shared.control.engine import PrefixCacheReset, ResetPrefixCache, Sleep, WakeUp
from penstock.shared.errors import ConfigurationError
from penstock.shared.messages.core import EngineCoreOutputs, Ready
from penstock.shared.stats import KVOffloadStats
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import Engine, build_engine
from penstock.worker.engine.ranks.one import OneRank

from ....processes import DEADLINE_S
from ..harness import LONG_PROMPT, SHAPE, CoreProcess, MakeEngine, ask, request
from ..pooling.pooling_models import array_of, make_model, pool
from ..pooling.pooling_models import request as pooling_request

# Two of the prompt's 40 tokens; of its 30 tokens of output two more.
NUM_CACHED, NUM_BLOCKS = 32, 4


@pytest.fixture(autouse=True)
def _all_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is closed writes for as long as it takes, however busy the disk is."""
    monkeypatch.setattr("penstock.worker.engine.offload.offload._CLOSE_TIMEOUT_S", DEADLINE_S)


def engine_of(folder: Path, of: Engine | None = None, /, **options: Any) -> Engine:
    """Build an engine with the model of ``of``, which computes nothing any more, or one that loads it."""
    config = EngineConfig(model=str(folder), num_threads=1, kv_cache_memory=1 << 22, **options)
    if of is None:
        return build_engine(config, folder)
    assert isinstance(of.ranks, OneRank)
    return build_engine(config, folder, ranks=OneRank(config, folder, of.ranks.model))


def answer(engine: Engine, prompt: list[int] = LONG_PROMPT, name: str = "r", **params: Any) -> tuple[list[int], int]:
    """The tokens of a request, and how many of its prompt were cached."""
    assert engine.core.add_request(request(name, prompt, **params)) is None
    tokens: list[int] = []
    cached = 0
    while engine.core.has_work:
        for output in engine.core.step_fn():
            assert output.error is None
            tokens += output.new_token_ids
            cached = output.num_cached_tokens
    engine.core.check_invariants()
    return tokens, cached


def answer_and_write(engine: Engine, prompt: list[int]) -> tuple[list[int], int]:
    """``answer``, and its full blocks are kept."""
    found = answer(engine, prompt)
    assert engine.offload is not None
    engine.offload.write_behind.finish(DEADLINE_S)
    return found


def stats(engine: Engine) -> KVOffloadStats:
    found = engine.core.stats().kv_offload
    assert found is not None
    return found


def block_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("blocks/*/*/*.kv"))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {"dtype": "bfloat16"}),
        ("llama", {"deterministic": True}),
        ("llama", {"async_scheduling": True}),
        ("llama", {"speculative": "ngram"}),
        ("llama", {"kv_cache_dtype": "fp8"}),
        ("llama", {"kv_cache_dtype": "int8", "dtype": "bfloat16"}),
        ("gemma2", {"kv_cache_dtype": "int8", "native_kernels": False}),
        ("llama", {"block_size": 6}),
        ("qwen3", {"quantization": "int8"}),
        ("mistral", {"native_kernels": False}),
        ("gemma2", {}),
        ("gpt_oss", {"dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_an_engine_reads_the_stored_blocks_of_its_predecessor(
    model: str, options: dict[str, Any], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Covers every cache layout, with sampling so that a wrong bit shows sooner."""
    folder, sampled = model_folder(model), {"temperature": 1.0, "seed": 7}
    plain = engine_of(folder, **options)
    expected, _ = answer(plain, **sampled)
    before = engine_of(folder, plain, kv_offload_dir=str(tmp_path), **options)
    assert answer(before, **sampled) == (expected, 0)
    before.close()
    assert stats(before).num_dropped_blocks == 0
    after = engine_of(folder, kv_offload_dir=str(tmp_path), **options)
    cached = 39 // options.get("block_size", 16) * options.get("block_size", 16)
    assert answer(after, **sampled) == (expected, cached)
    assert stats(after).num_hit_tokens == cached
    # A conversation goes on: what was said is there, too.
    longer = LONG_PROMPT + expected
    follows, cached = answer(after, longer, "next")
    assert cached > len(LONG_PROMPT)
    assert follows == answer(engine_of(folder, before, **options), longer, "next")[0]


def test_host_memory_extends_a_cache_that_is_too_small(model_folder: Callable[[str], Path]) -> None:
    """Every prompt fills the whole cache and is restored nevertheless."""
    folder = model_folder("llama")
    with capture_logs() as told:
        engine = build_engine(
            EngineConfig(
                model=str(folder),
                num_threads=1,
                max_model_len=80,
                kv_cache_memory=5 * 16 * 1024,
                kv_offload_memory=1 << 20,
                max_num_seqs=1,
            ),
            folder,
        )
    assert [line["instead"] for line in told if line["event"] == "kv_offload_memory_beside_cache"]
    prompts = [[number, *LONG_PROMPT] for number in (50, 60, 70)]
    # The next prompt takes the blocks of the one before, copied or not: what was noted is waited for in between.
    first, second = [[answer_and_write(engine, prompt) for prompt in prompts] for _ in range(2)]
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in second]
    assert [cached for _, cached in first] == [0, 0, 0]
    assert [cached for _, cached in second] == [NUM_CACHED] * 3
    assert stats(engine).memory_bytes == 3 * NUM_BLOCKS * 16 * 1024


@pytest.mark.gpu
def test_blocks_of_a_gpu(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder, on_gpu = model_folder("llama"), {"device": "cuda", "dtype": "bfloat16"}
    expected, _ = answer(engine_of(folder, **on_gpu))
    before = engine_of(folder, kv_offload_dir=str(tmp_path), kv_offload_memory=1 << 20, **on_gpu)
    assert answer(before) == (expected, 0)
    before.close()
    assert before.core.forget_blocks()
    assert answer(before) == (expected, NUM_CACHED), "from memory"
    assert answer(engine_of(folder, kv_offload_dir=str(tmp_path), **on_gpu)) == (expected, NUM_CACHED)


def config_json(folder: Path, kv_offload_dir: Path) -> bytes:
    config = EngineConfig(model=str(folder), num_threads=1, kv_cache_memory=1 << 22, kv_offload_dir=str(kv_offload_dir))
    return config.encode()


def serve_until_written(folder: Path, kept: Path) -> list[int]:
    """A core in a process of its own answers, and is killed once its blocks are in the folder."""
    process = CoreProcess()
    try:
        assert isinstance(process.start(config_json(folder, kept)), Ready)
        process.send(request("r", LONG_PROMPT))
        tokens = [token for output in process.collect(1)["r"] for token in output.new_token_ids]
        give_up_at = time.monotonic() + DEADLINE_S
        while len(block_files(kept)) < NUM_BLOCKS:
            assert time.monotonic() < give_up_at
            time.sleep(0.005)
    finally:
        process.process.kill()
        process.close()
    return tokens


def test_a_core_reads_the_stored_blocks_of_a_killed_core(
    packed_model: Path, tmp_path: Path, core_process: CoreProcess
) -> None:
    """A damaged block of three is reported, recomputed and replaced."""
    kept = tmp_path / "kept"
    tokens = serve_until_written(packed_model, kept)
    assert isinstance(core_process.start(config_json(packed_model, kept)), Ready)
    core_process.send(request("r", LONG_PROMPT))
    outputs = core_process.collect(1)["r"]
    assert [token for output in outputs for token in output.new_token_ids] == tokens
    assert outputs[0].num_cached_tokens == NUM_CACHED

    third = engine_of(packed_model, kv_offload_dir=str(kept))
    longer = LONG_PROMPT + tokens
    hashes = hashes_of(third, longer)
    (file,) = kept.glob(f"blocks/*/*/{hashes[1].hex()}.kv")
    content = bytearray(file.read_bytes())
    content[-5000] ^= 1
    file.write_bytes(content)
    with capture_logs() as told:
        follows, cached = answer(third, longer)
    assert cached == 16, "the first block alone"
    assert stats(third).num_corrupt_blocks == 1
    assert [line["block_hash"] for line in told if line["event"] == "kv_block_corrupt"] == [hashes[1].hex()]
    assert follows == answer(engine_of(packed_model), longer)[0]
    third.close()
    assert answer(engine_of(packed_model, kv_offload_dir=str(kept)), longer) == (follows, 64)


def hashes_of(engine: Engine, prompt: list[int]) -> list[bytes]:
    """Make the hashes as the engine does."""
    made = engine.core._make_request(request("h", prompt))
    engine.core.scheduler._prefix_cache.find(made)
    return made.block_hashes


def test_other_weights_dtypes_and_settings_have_separate_stored_blocks(packed_model: Path, tmp_path: Path) -> None:
    kept = {"kv_offload_dir": str(tmp_path / "kept")}
    before = engine_of(packed_model, **kept)
    answer(before)
    before.close()
    assert answer(engine_of(packed_model, **kept))[1] == NUM_CACHED
    for options in ({"dtype": "bfloat16"}, {"block_size": 8}, {"quantization": "int8"}, {"native_kernels": False}):
        other = engine_of(packed_model, **kept, **options)
        assert answer(other)[1] == 0, options
        other.close()
    # The same model but for one number of one of its tensors, in the same place.
    file = packed_model / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    next(iter(tensors.values())).view(-1)[17] += 1e-3
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    changed = engine_of(packed_model, **kept)
    tokens, cached = answer(changed)
    assert cached == 0
    assert tokens == answer(engine_of(packed_model))[0]


def test_concurrent_engines_read_each_others_stored_blocks(packed_model: Path, tmp_path: Path) -> None:
    first, second = (engine_of(packed_model, kv_offload_dir=str(tmp_path)) for _ in range(2))
    expected, _ = answer(first)
    first.close()
    assert second.offload is not None
    second.offload._tiers.look_for_new()
    assert answer(second) == (expected, NUM_CACHED)
    # Another tenant's request is another one, whoever has computed it.
    message = request("t", LONG_PROMPT)
    message.tenant = "somebody else"
    assert second.core.add_request(message) is None
    while second.core.has_work:
        for output in second.core.step_fn():
            assert output.num_cached_tokens == 0


def test_a_sleep_keeps_the_folder_and_new_weights_do_not_meet_old_blocks(
    make_engine: MakeEngine, packed_model: Path, tmp_path: Path
) -> None:
    engine = make_engine(kv_offload_dir=str(tmp_path / "kept"), kv_offload_memory=1 << 20)
    expected, _ = answer(engine)
    engine.close()
    for level in (1, 2):
        ask(engine, Sleep(level=level))
        ask(engine, WakeUp())
        assert answer(engine) == (expected, NUM_CACHED)
    ask(engine, Sleep(level=2))
    file = packed_model / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    for tensor in tensors.values():
        tensor += torch.randn_like(tensor) / 50
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    ask(engine, WakeUp())
    tokens, cached = answer(engine)
    assert cached == 0
    assert tokens == answer(make_engine())[0]


def test_resetting_the_prefix_cache_forgets_the_folder(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Weights changed by an operator's method have separate blocks from then on."""
    engine = make_engine(kv_offload_dir=str(tmp_path))
    answer(engine)
    engine.close()
    assert len(block_files(tmp_path)) == NUM_BLOCKS
    assert ask(engine, ResetPrefixCache()) == PrefixCacheReset(True)
    assert block_files(tmp_path) == []
    assert answer(engine)[1] == 0
    engine.close()
    (before,) = {path.parent.parent.name for path in block_files(tmp_path)}
    network = engine.control._parts.rpc_engine.model.network
    with torch.inference_mode():
        next(network.parameters()).flatten()[3] += 0.5
    assert ask(engine, ResetPrefixCache()) == PrefixCacheReset(True)
    answer(engine)
    engine.close()
    assert before not in {path.parent.parent.name for path in block_files(tmp_path)}


def test_models_with_more_than_blocks_are_refused_by_name(tmp_path: Path) -> None:
    make_model(tmp_path / "bert", "bert")
    with pytest.raises(ConfigurationError, match="kv_offload_memory is not for BertModel: it is an encoder"):
        engine_of(tmp_path / "bert", runner="pooling", kv_offload_memory=1 << 20)
    config = transformers.AutoConfig.for_model(
        "lfm2", **SHAPE, layer_types=["conv", "full_attention"] * 2, block_multiple_of=8
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "lfm2")
    (tmp_path / "lfm2" / "tokenizer.json").write_text((tmp_path / "bert" / "tokenizer.json").read_text())
    with pytest.raises(ConfigurationError, match="kv_offload_dir is not for Lfm2ForCausalLM: it keeps states"):
        engine_of(tmp_path / "lfm2", kv_offload_dir=str(tmp_path / "kept"))


def test_decoders_that_pool_read_blocks_too(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "qwen3")
    prompt = list(range(5, 45))
    found = []
    for _ in range(2):
        engine = engine_of(tmp_path / "model", runner="pooling", kv_offload_dir=str(tmp_path / "kept"))
        task = engine.ready.supported_tasks[0]
        found.append(pool(engine.core, [pooling_request("r", prompt, task=task)])["r"])
        engine.close()
    first, second = found
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, NUM_CACHED)
    assert (abs(array_of(first) - array_of(second)) < 1e-5).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"enable_prefix_caching": False}, "kv_offload_dir needs prefix caching"),
        ({"kv_offload_dir_size": 1000}, "kv_offload_dir_size is 1000 B, and one block"),
        ({"kv_offload_memory": 1 << 49}, "kv_offload_memory lets KV blocks take"),
        ({"kv_offload_memory": 100}, "kv_offload_memory is 100 B, and one block"),
    ],
    ids=str,
)
def test_impossible_values_are_refused_by_name(
    options: dict[str, Any], said: str, packed_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        engine_of(packed_model, kv_offload_dir=str(tmp_path), **options)


def test_an_unwritable_folder_is_reported_and_the_engine_serves(packed_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with capture_logs() as told:
        engine = engine_of(packed_model, kv_offload_dir=str(tmp_path / "file"))
        tokens, _ = answer(engine)
        engine.close()
    assert tokens == answer(engine_of(packed_model))[0]
    assert [line["log_level"] for line in told if line["event"] == "kv_offload_dir_unusable"] == ["warning"]
    assert stats(engine).num_dropped_blocks == NUM_BLOCKS


def test_the_core_reports_offload_statistics(packed_model: Path, tmp_path: Path, core_process: CoreProcess) -> None:
    assert isinstance(core_process.start(config_json(packed_model, tmp_path / "kept")), Ready)
    core_process.send(request("r", LONG_PROMPT))
    while True:
        message = core_process.receive()
        assert isinstance(message, EngineCoreOutputs)
        if any(output.finished for output in message.outputs):
            break
    assert message.scheduler_stats is not None
    assert message.scheduler_stats.kv_offload is not None
    assert message.scheduler_stats.kv_offload.num_queried_tokens == NUM_CACHED
