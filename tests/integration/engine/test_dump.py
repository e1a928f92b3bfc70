"""A model whose own code raises: what the engine tells of the step, and who goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penstock.shared.messages.outcome import FinishReason
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import build_engine

from .harness import request

CODE = """
from transformers import LlamaForCausalLM

class FaultyLlamaForCausalLM(LlamaForCausalLM):
    def forward(self, input_ids=None, **kwargs):
        if (input_ids == 6).any():
            raise RuntimeError("a fault of one request")
        return super().forward(input_ids=input_ids, **kwargs)
"""


@pytest.fixture
def faulty_model(demo_model: Path, tmp_path: Path) -> Path:
    """The demo model, which raises at token 6."""
    folder = tmp_path / "faulty"
    shutil.copytree(demo_model, folder)
    (folder / "modeling_faulty.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["FaultyLlamaForCausalLM"]
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_faulty.FaultyLlamaForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("shows_prompts", [False, True])
def test_a_step_that_raises_leaves_a_file(faulty_model: Path, tmp_path: Path, shows_prompts: bool) -> None:
    config = EngineConfig(
        model=str(faulty_model),
        trust_remote_code=True,
        num_threads=1,
        max_num_seqs=4,
        kv_cache_memory=1 << 24,
        dump_dir=str(tmp_path / "dumps"),
        dump_prompts=shows_prompts,
    )
    core = build_engine(config, faulty_model).core
    for request_id, prompt in (("good", [10, 11]), ("bad", [10, 6])):
        core.add_request(request(request_id, prompt, max_tokens=2))
    ends: dict[str, FinishReason | None] = {}
    while core.has_work:
        ends |= {output.request_id: output.finish_reason for output in core.step_fn() if output.finished}
    assert ends == {"good": FinishReason.LENGTH, "bad": FinishReason.ERROR}
    # The batch first, then the one of it that raises alone.
    together, alone = [json.loads(path.read_text()) for path in sorted((tmp_path / "dumps").iterdir())]
    assert [one["request_id"] for one in together["requests"]] == ["good", "bad"]
    assert [one["request_id"] for one in alone["requests"]] == ["bad"]
    assert together["error"] == alone["error"] == "RuntimeError: a fault of one request"
    assert "modeling_faulty.py" in alone["trace"]
    assert together["scheduler"]["num_running_reqs"] == 2
    prompts = [one.get("prompt_token_ids") for one in together["requests"]]
    assert prompts == ([[10, 11], [10, 6]] if shows_prompts else [None, None])
