"""One model through transformers alone and through the engine, in the ways in which an engine may cut up its work."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from ....shared.errors import ConfigurationError, PenstockError
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.sampling import SamplingParams
from ....worker.config.engine_config import EngineConfig
from ....worker.engine.composition import Engine, build_engine, make_ranks
from ....worker.engine.core.engine_core import EngineCore
from ....worker.engine.ranks.one import OneRank
from ....worker.engine.setup.host import load_native_kernels
from ....worker.models.loaded import LoadedModel
from ....worker.models.loading.calibration import do_not_report
from .outcome import NEVER, SAME
from .small_config import VOCAB_SIZE

NUM_NEW_TOKENS = 16
MAX_MODEL_LEN = 64
_PROMPT_LENS = (3, 1, 17, 40, 9, 25)
_BLOCK_SIZE = 4
_MAX_NUM_SEQS = 6
_SMALL_BUDGET = 8
# Ours and transformers' logits differ by 1e-6 of the largest in float32; a closer call than this proves nothing.
_SMALLEST_LEAD = 1e-4
_SEEDS = range(5)
_MIN_DISTINCT_TOKENS = 8


class UnsuitableModelError(Exception):
    """The random model cannot be judged, or transformers itself cannot run it."""


@dataclass
class Expectation:
    """Greedy outputs of transformers for each prompt."""

    prompts: list[list[int]]
    tokens: list[list[int]]

    @property
    def num_new_tokens(self) -> int:
        """Generated tokens per prompt."""
        return len(self.tokens[0])


def make_prompts() -> list[list[int]]:
    """Token ids of prompts of different lengths."""
    rng = random.Random(0)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in _PROMPT_LENS]


def write_model(config: PretrainedConfig, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
    """Write a model of ``config`` with random weights into ``folder``."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    vocabulary = {f"<{i}>": i for i in range(VOCAB_SIZE)}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<0>"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def find_model(
    config: PretrainedConfig,
    folder: Path,
    num_new_tokens: int = NUM_NEW_TOKENS,
    prompts: list[list[int]] | None = None,
) -> Expectation:
    """Write a random model into ``folder``, and return the outputs of transformers' ``generate`` for some prompts.

    Weights are drawn again, up to four times, if any choice is closer than rounding, or the model repeats
    itself too much to prove anything.

    Raises:
        UnsuitableModelError: none of the five was suitable.
    """
    prompts = prompts or make_prompts()
    reason = ""
    for seed in _SEEDS:
        write_model(config, folder, seed)
        tokens, lead = _generate_by_transformers(folder, prompts, num_new_tokens)
        num_distinct = len({token for row in tokens for token in row})
        if num_distinct < _MIN_DISTINCT_TOKENS:
            reason = f"random models of it repeat themselves ({num_distinct} different tokens)"
        elif not lead > _SMALLEST_LEAD:
            reason = f"two tokens lie too close together (lead {lead:.0e})"
        else:
            return Expectation(prompts, tokens)
    raise UnsuitableModelError(reason)


@torch.inference_mode()
def _generate_by_transformers(
    folder: Path, prompts: list[list[int]], num_new_tokens: int
) -> tuple[list[list[int]], float]:
    """Return the tokens of each prompt alone, and the smallest lead of a chosen token relative to the largest logit."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    # Greedy tokens and nothing else: the configurations of some types force a token at the end.
    model.generation_config = GenerationConfig(pad_token_id=0)
    tokens, leads = [], []
    for prompt in prompts:
        input_ids = torch.tensor([prompt])
        out = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=num_new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.cat(out.logits)
        best = logits.topk(2).values
        leads.append(((best[:, 0] - best[:, 1]) / logits.abs().amax(dim=1)).min().item())
        tokens.append(out.sequences[0, len(prompt) :].tolist())
    return tokens, min(leads)


class CacheSizes(Protocol):
    """Sizes of a forward's caches."""

    @property
    def bytes_per_token(self) -> int: ...

    @property
    def bytes_per_request(self) -> int: ...


def load(folder: Path, **options: Any) -> LoadedModel:
    """Load the model with the engine's code; with several ranks, the part of rank 0.

    Args:
        options: of ``EngineConfig``.

    Raises:
        ConfigurationError: the model cannot be served.
    """
    config = EngineConfig(model=str(folder), max_model_len=MAX_MODEL_LEN, num_threads=1, **options)
    # Some models are lean only where they are: see ``kernels.mixers``.
    load_native_kernels(config)
    ranks = make_ranks(config, folder)
    try:
        return ranks.load(do_not_report)
    finally:
        ranks.close()


class Generated(msgspec.Struct):
    """Tokens of an engine for batches of prompts, by batch and prompt, and its number of preemptions."""

    tokens: list[list[list[int]]]
    num_preemptions: int


def run_engine(
    folder: Path,
    batches: list[list[list[int]]],
    num_new_tokens: int,
    model: LoadedModel | None = None,
    **options: Any,
) -> Generated:
    """Build an engine, generate from ``batches`` in turn, and close it.

    Args:
        model: result of ``load`` for ``folder``, for an engine of one rank; None to load it again.
        options: fields of ``EngineConfig``; with ``model`` none that affect loading.
    """
    with closing(build_whole(folder, model, **options)) as engine:
        tokens = [generate(engine.core, batch, num_new_tokens) for batch in batches]
        return Generated(tokens, engine.core.scheduler.stats().num_preemptions)


def compare(
    folder: Path,
    expectation: Expectation,
    sizes: CacheSizes,
    run: Callable[..., Generated] = run_engine,
    **options: Any,
) -> dict[str, str]:
    """Run ``expectation`` through engines, one after the other. Return ``SAME`` or the difference for each of ``WAYS``.

    Args:
        sizes: cache sizes of the model in ``folder``.
        run: runs each engine, with the arguments of ``run_engine``; by default each loads the model again.
        options: fields of ``EngineConfig`` for all engines.
    """
    prompts = expectation.prompts
    options = {"num_new_tokens": expectation.num_new_tokens, **options}
    *alone, mixed = run(folder, [*([prompt] for prompt in prompts), prompts], **options).tokens
    results = {
        "alone": _judge(expectation, [tokens for (tokens,) in alone]),
        "mixed": _judge(expectation, mixed),
    }
    chunked = {"max_num_batched_tokens": _SMALL_BUDGET, "enable_prefix_caching": False, **options}
    results["chunked"] = _judge(expectation, run(folder, [prompts], **chunked).tokens[0])
    if not sizes.bytes_per_token:
        return results | {"preempted": NEVER}
    results["preempted"] = "was not preempted"
    # Layers with windows give blocks back: there is room in less.
    for share in (1.0, 0.6):
        try:
            cramped = run(folder, [prompts], **_cramped(sizes, share), **options)
        except ConfigurationError:
            break  # no request of the longest kind has room any more
        if cramped.num_preemptions:
            results["preempted"] = _judge(expectation, cramped.tokens[0])
            break
    return results


def build_cramped(folder: Path, sizes: CacheSizes, **options: Any) -> EngineCore:
    """Build an engine whose KV cache holds little more than one longest request, with a small step budget."""
    return build(folder, **_cramped(sizes), **options)


def _cramped(sizes: CacheSizes, share: float = 1.0) -> dict[str, Any]:
    num_tokens = int(share * (MAX_MODEL_LEN + 4 * _BLOCK_SIZE))
    memory = num_tokens * sizes.bytes_per_token + _MAX_NUM_SEQS * sizes.bytes_per_request
    return {"kv_cache_memory": memory, "max_num_batched_tokens": _SMALL_BUDGET}


def build(folder: Path, **options: Any) -> EngineCore:
    """Build the core of an engine of one rank over the model in ``folder``."""
    return build_whole(folder, **options).core


def build_whole(folder: Path, model: LoadedModel | None = None, **options: Any) -> Engine:
    """Build an engine over the model in ``folder``, which the caller closes; ``model``: see ``run_engine``."""
    config = EngineConfig(
        model=str(folder),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=_MAX_NUM_SEQS,
        block_size=_BLOCK_SIZE,
        num_threads=1,
        **options,
    )
    return build_engine(config, folder, ranks=None if model is None else OneRank(config, folder, model))


def generate(core: EngineCore, prompts: list[list[int]], num_new_tokens: int = NUM_NEW_TOKENS) -> list[list[int]]:
    """Return greedy tokens of ``prompts``, computed together, without cached blocks of earlier requests."""
    core.reset_prefix_cache()
    tokens: list[list[int]] = [[] for _ in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        core.add_request(EngineCoreRequest(request_id=str(index), prompt_token_ids=prompt, sampling_params=params))
    while core.has_work:
        for output in core.step_fn():
            if output.error is not None:
                raise PenstockError(output.error.message)
            tokens[int(output.request_id)] += output.new_token_ids
    core.check_invariants()
    return tokens


def _judge(expectation: Expectation, tokens: list[list[int]]) -> str:
    different = [index for index, row in enumerate(tokens) if row != expectation.tokens[index]]
    return SAME if not different else f"{len(different)} of {len(tokens)} differ"
