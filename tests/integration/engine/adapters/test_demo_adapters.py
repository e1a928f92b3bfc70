"""The adapters of the demo have the tokens of the demo model with them merged, and answer as they promise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from penstock.ops.demo.styles import ADAPTERS, STYLES, style_questions
from penstock.ops.demo.task import Question
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import build_engine

from ....conftest import DEMO_MODEL
from ..harness import generate, request
from .peft_folders import load_base, lora_request

MAX_TOKENS = 64


def merged(folder: Path) -> Any:
    """The demo model with an adapter in its weights: PEFT's documented arithmetic, without the project's reader."""
    model = load_base(DEMO_MODEL)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            low_rank = tensors[name.replace("lora_A", "lora_B")].double() @ tensors[name].double()
            model.get_parameter(f"{layer}.weight").add_((config["lora_alpha"] / config["r"] * low_rank).float())
    return model


@torch.inference_mode()
def answers_of(model: Any, prompt: list[int]) -> list[int]:
    made = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=MAX_TOKENS)
    return made[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return style_questions(3, seed=7)


def test_a_batch_of_all_has_transformers_tokens_and_the_promised_words(questions: list[Question]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    prompts = [tokenizer(question.prompt)["input_ids"] for question in questions]
    asked: list[EngineCoreRequest] = []
    expected: dict[str, list[int]] = {}
    said: dict[str, str] = {}
    for number, style in enumerate(("base", *STYLES)):
        model = load_base(DEMO_MODEL) if style == "base" else merged(ADAPTERS / style)
        adapter = None if style == "base" else lora_request(ADAPTERS / style, number)
        for question, prompt in zip(questions, prompts, strict=True):
            one = request(f"{style}: {question.prompt}", prompt, max_tokens=MAX_TOKENS, ignore_eos=False)
            asked.append(msgspec.structs.replace(one, lora_request=adapter))
            expected[one.request_id] = answers_of(model, prompt)
            said[one.request_id] = question.answer if style == "base" else STYLES[style](question)
    config = EngineConfig(model=str(DEMO_MODEL), num_threads=1, kv_cache_memory=1 << 23, enable_lora=True)
    found = generate(build_engine(config, DEMO_MODEL).core, asked)
    assert found == expected
    words = {name: tokenizer.decode(tokens, skip_special_tokens=True).strip() for name, tokens in found.items()}
    wrong = {name: text for name, text in words.items() if text != said[name]}
    assert len(wrong) <= 1, wrong


def test_they_are_small(questions: list[Question]) -> None:
    for style in STYLES:
        assert (ADAPTERS / style / "adapter_model.safetensors").stat().st_size < 150_000
        assert any(STYLES[style](question) != question.answer for question in questions)
