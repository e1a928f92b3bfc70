"""The model that the tests of faults use does exactly the faults that its prompts name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers

from .faulty_model import HOLD_GIL, make_faulty_model


def test_a_sign_is_obeyed_once_in_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens have two pairs in them: a length that a test has chosen would be twice as long."""
    folder = make_faulty_model(tmp_path / "faulty")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    obeyed: list[str] = []
    monkeypatch.setattr(sys.modules[type(model).__module__], "act", obeyed.append)
    with torch.inference_mode():
        model(torch.tensor([tokenizer.encode(f"one {HOLD_GIL} two")]))
        assert obeyed == [HOLD_GIL[0]]
        model(torch.tensor([tokenizer.encode("one % two")]))
    assert obeyed == [HOLD_GIL[0]]
