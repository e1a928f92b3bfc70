"""Prompts as embeddings give the tokens of transformers' own ``generate``, however the work is cut up and mixed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXForCausalLM

from penstock.producer.inputs.prompt import encode_embeds
from penstock.shared.errors import ConfigurationError
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.prompts import PromptEmbeds
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import build_engine
from penstock.worker.engine.core.engine_core import EngineCore

from .harness import generate, request

NUM_TOKENS = 30
HIDDEN_SIZE = 64
SMALLEST_LEAD = 1e-4
LENGTHS = (5, 1, 40, 23)
ENABLED = {"enable_prompt_embeds": True}


def with_embeds(request_id: str, embeds: Any, output: list[int] | None = None, **params: Any) -> EngineCoreRequest:
    """Build a request as ``request`` does, with a prompt of embeddings."""
    made = request(request_id, [], output, **params)
    return msgspec.structs.replace(made, prompt_token_ids=None, prompt_embeds=encode_embeds(embeds))


@pytest.fixture(scope="module")
def module(model_folder: Callable[[str], Path]) -> Any:
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama"), attn_implementation="eager")
    module.generation_config.eos_token_id = None
    return module


@pytest.fixture(scope="module")
def embeds(module: Any) -> list[torch.Tensor]:
    """Rows that are no token's embedding, about as large."""
    generator = torch.Generator().manual_seed(1)
    size = module.get_input_embeddings().weight.std().item()
    return [torch.randn(n, HIDDEN_SIZE, generator=generator) * size for n in LENGTHS]


@pytest.fixture(scope="module")
def expected(module: Any, embeds: list[torch.Tensor]) -> list[list[int]]:
    """Each alone through ``generate``, with a check that no choice was close."""
    tokens = []
    for rows in embeds:
        out = module.generate(
            inputs_embeds=rows[None],
            attention_mask=torch.ones(1, len(rows), dtype=torch.long),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(out.logits).topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > SMALLEST_LEAD
        tokens.append(out.sequences[0].tolist())
    assert len({token for row in tokens for token in row}) > 20, "a model that repeats itself proves little"
    return tokens


def test_same_tokens_as_transformers_alone_mixed_chunked_and_preempted(
    make_core: Callable[..., EngineCore],
    embeds: list[torch.Tensor],
    expected: list[list[int]],
    prompts: list[list[int]],
) -> None:
    asked = [with_embeds(f"e{i}", rows) for i, rows in enumerate(embeds)]
    plain = [request(f"t{i}", prompt) for i, prompt in enumerate(prompts)]
    roomy = make_core("llama", **ENABLED)
    alone = generate(roomy, [asked[2]])
    assert alone["e2"] == expected[2]
    of_tokens = generate(make_core("llama"), plain)
    mixed = [r for pair in zip(asked, plain, strict=False) for r in pair]
    for core in (
        roomy,
        make_core(
            "llama",
            **ENABLED,
            num_blocks=26,
            block_size=4,
            max_model_len=80,
            max_num_seqs=6,
            max_num_batched_tokens=8,
        ),
    ):
        found = generate(core, mixed)
        assert [found[r.request_id] for r in asked] == expected
        assert all(found[r.request_id] == of_tokens[r.request_id] for r in plain[: len(asked)])
    assert core.scheduler.stats().num_preemptions > 0


def test_a_resumed_request_continues_after_its_last_token(
    make_core: Callable[..., EngineCore], embeds: list[torch.Tensor], expected: list[list[int]]
) -> None:
    core = make_core("llama", **ENABLED)
    for num_delivered in (1, 17):
        resumed = with_embeds("r", embeds[2], expected[2][:num_delivered])
        assert generate(core, [resumed])["r"] == expected[2][num_delivered:]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 5, "presence_penalty": 0.5, "logprobs": 1}])
def test_the_models_own_embeddings_of_tokens_are_those_tokens(
    make_core: Callable[..., EngineCore], module: Any, prompts: list[list[int]], params: dict[str, Any]
) -> None:
    core = make_core("llama", **ENABLED)
    looked_up = [module.get_input_embeddings()(torch.tensor(prompt)) for prompt in prompts]
    by_embeds = generate(core, [with_embeds(str(i), rows, **params) for i, rows in enumerate(looked_up)])
    assert by_embeds == generate(core, [request(str(i), prompt, **params) for i, prompt in enumerate(prompts)])


def test_blocks_are_shared_with_the_same_embeddings_only(
    make_core: Callable[..., EngineCore], embeds: list[torch.Tensor], expected: list[list[int]]
) -> None:
    core = make_core("llama", **ENABLED, block_size=4)
    other = embeds[2].clone()
    other[0, 0] += 1.0
    first = generate(core, [with_embeds("a", embeds[2])])["a"]
    assert core.scheduler.stats().prefix_cache_hits == 0
    changed = generate(core, [with_embeds("b", other)])["b"]
    assert generate(core, [request("c", [0] * LENGTHS[2])])["c"] != first
    assert core.scheduler.stats().prefix_cache_hits == 0, "neither other embeddings nor the placeholders are the same"
    assert generate(core, [with_embeds("d", embeds[2])])["d"] == first == expected[2]
    assert core.scheduler.stats().prefix_cache_hits == (LENGTHS[2] - 1) // 4 * 4
    assert changed != first


def test_penalties_take_no_placeholder_for_a_token(
    make_core: Callable[..., EngineCore], embeds: list[torch.Tensor]
) -> None:
    """The model prefers the placeholder's token; a penalty for it as a prompt token would suppress it."""
    core = make_core("llama", **ENABLED)
    bias = {"logit_bias": {0: 40.0}, "max_tokens": 1, "repetition_penalty": 100.0}
    assert generate(core, [with_embeds("e", embeds[2], **bias)])["e"] == [0]
    assert generate(core, [request("t", [0, 7, 9], **bias)])["t"] != [0]


def test_deterministic_engines_agree_on_them(
    make_core: Callable[..., EngineCore], embeds: list[torch.Tensor], expected: list[list[int]], prompts
) -> None:
    core = make_core("llama", **ENABLED, deterministic=True)
    together = generate(core, [*(with_embeds(str(i), rows) for i, rows in enumerate(embeds)), request("t", prompts[3])])
    assert [together[str(i)] for i in range(len(embeds))] == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_are_widened(
    make_core: Callable[..., EngineCore], embeds: list[torch.Tensor], dtype: torch.dtype
) -> None:
    core = make_core("llama", **ENABLED)
    narrow = embeds[2].to(dtype)
    found = generate(core, [with_embeds("narrow", narrow), with_embeds("wide", narrow.float())])
    assert found["narrow"] == found["wide"]


def test_invalid_prompt_embeds_are_refused_by_name(make_core: Callable[..., EngineCore], embeds) -> None:
    core, disabled = make_core("llama", **ENABLED), make_core("llama")
    rows = embeds[0]
    infinite, not_a_number = rows.clone(), rows.to(torch.bfloat16)
    infinite[3, 7], not_a_number[0, 0] = float("inf"), float("nan")
    for where, asked, code, said in (
        (disabled, with_embeds("r", rows), "unsupported_parameter", "--enable-prompt-embeds"),
        (core, with_embeds("r", rows[:, :32]), "validation_error", "hidden size is 64"),
        (core, with_embeds("r", infinite), "validation_error", "must be finite"),
        (core, with_embeds("r", not_a_number), "validation_error", "must be finite"),
        (core, with_embeds("r", rows.repeat(60, 1)), "prompt_too_long", "max_model_len is 256"),
        (core, with_embeds("r", rows, prompt_logprobs=0), "unsupported_parameter", "prompt_logprobs"),
        (
            core,
            msgspec.structs.replace(with_embeds("r", rows), prompt_token_ids=[1]),
            "validation_error",
            "give one of them",
        ),
    ):
        refused = where.add_request(asked)
        assert refused is not None
        assert refused.error is not None
        assert (refused.error.code, said in refused.error.message) == (code, True), refused.error.message


def test_a_model_that_needs_its_token_ids_is_refused_at_the_start(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = GPTNeoXForCausalLM.forward

    def by_ids_only(self: Any, input_ids: Any = None, **kwargs: Any) -> Any:
        return forward(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(GPTNeoXForCausalLM, "forward", by_ids_only)
    folder = model_folder("gpt_neox")
    with pytest.raises(ConfigurationError, match="GPTNeoXForCausalLM cannot be run from embeddings"):
        build_engine(EngineConfig(model=str(folder), num_threads=1, enable_prompt_embeds=True), folder)


def test_arrays_of_numpy_and_torch_travel_alike(embeds: list[torch.Tensor]) -> None:
    rows = embeds[0]
    of_torch = encode_embeds(rows.requires_grad_().T.contiguous().T)
    assert of_torch == encode_embeds(np.asfortranarray(rows.detach().numpy()))
    assert of_torch == PromptEmbeds("float32", (5, HIDDEN_SIZE), rows.detach().numpy().tobytes())
    narrow = rows.detach().to(torch.bfloat16)
    assert encode_embeds(narrow).data == narrow.view(torch.int16).numpy().tobytes()
