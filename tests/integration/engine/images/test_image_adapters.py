"""Adapters that were trained on a whole model that reads images, computed with its text model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file

from penstock.ops.lab.survey.images.models import write_vision_model
from penstock.ops.lab.survey.images.processors import PLACEHOLDER
from penstock.ops.lab.survey.images.truth import by_transformers, load_by_transformers, picture, png
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.images import ImageInput
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import Engine, build_engine

from ..adapters.peft_folders import Kind, lora_request, merge, write_adapter

NUM_TOKENS = 8
WORDS = list(range(40, 61))
PROMPT = [*WORDS, PLACEHOLDER, *range(80, 87)]
TEXT_ALONE = Kind(rank=4, alpha=8, targets=r".*(language_model|text_model).*\.(q_proj|v_proj|up_proj|down_proj)")


def load_whole(folder: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()


def engine_over(folder: Path) -> Engine:
    given: dict[str, Any] = {"num_threads": 1, "max_num_seqs": 4, "block_size": 8, "kv_cache_memory": 4 << 20}
    return build_engine(EngineConfig(model=str(folder), enable_lora=True, **given), folder)


def asked(request_id: str, adapter: Path | None) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=PROMPT,
        images=[ImageInput.from_bytes(png(picture(1)))],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
        lora_request=None if adapter is None else lora_request(adapter),
    )


def run(engine: Engine, requests: list[EngineCoreRequest]) -> dict[str, list[int]]:
    told: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        assert engine.core.add_request(request) is None
    while engine.core.has_work:
        for output in engine.core.step_fn():
            assert output.error is None, output.error
            told[output.request_id] += output.new_token_ids
    return told


def renamed(folder: Path, adapter: Path, change: Any) -> Path:
    """The same adapter with other names of layers."""
    folder.mkdir()
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({change(name): tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["target_modules"] = ["q_proj", "v_proj", "up_proj", "down_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["gemma3", "idefics3"])
def test_tokens_are_those_of_the_whole_model_with_the_adapter_merged(name: str, tmp_path: Path) -> None:
    """Covers names of the present and older transformers, and of the text model."""
    folder, merged = tmp_path / "model", tmp_path / "merged"
    processor = write_vision_model(name, folder)
    whole = load_whole(folder)
    adapter = write_adapter(tmp_path / "adapter", whole, TEXT_ALONE)
    merge(whole, TEXT_ALONE)
    whole.save_pretrained(merged)
    wanted = {
        "base": by_transformers(load_by_transformers(folder), processor, PROMPT, [picture(1)], NUM_TOKENS),
        "adapted": by_transformers(load_by_transformers(merged), processor, PROMPT, [picture(1)], NUM_TOKENS),
    }
    assert wanted["base"] != wanted["adapted"]
    engine = engine_over(folder)
    assert engine.ready.max_images, engine.ready.image_refusal
    assert run(engine, [asked("base", None), asked("adapted", adapter)]) == wanted
    part = "text_model" if name == "idefics3" else "language_model"
    for number, instead in enumerate(("language_model.model.", "model.")):
        other = renamed(tmp_path / str(number), adapter, lambda was, to=instead: was.replace(f"model.{part}.", to))
        assert run(engine, [asked("adapted", other)]) == {"adapted": wanted["adapted"]}
