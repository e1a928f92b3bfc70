"""Reference of transformers in float32: its greedy tokens, and the gaps of other sides' tokens to the best.

Input: ``{"model", "requests": [{"prompt_token_ids", "max_tokens"}], "claims": {side: [{"request", "token_ids"}]}}``.
Output: ``{"tokens": [[...]], "gaps": {side: [[...]]}, "versions"}``. A gap is, at each token of a claim under teacher
forcing, the best logit less the claimed token's, in standard deviations of the logits there: 0 where it is the best.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    question = json.loads(arguments.input.read_text())
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(question["model"], dtype=torch.float32).eval()
    requests = question["requests"]
    answer = {
        "tokens": [_generate(model, r["prompt_token_ids"], r["max_tokens"]) for r in requests],
        "gaps": {
            side: [_gaps(model, requests[claim["request"]]["prompt_token_ids"], claim["token_ids"]) for claim in claims]
            for side, claims in question["claims"].items()
        },
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
    }
    arguments.output.write_text(json.dumps(answer))


@torch.inference_mode()
def _generate(model: Any, prompt_token_ids: list[int], max_tokens: int) -> list[int]:
    if not max_tokens:
        return []
    input_ids = torch.tensor([prompt_token_ids])
    output = model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt_token_ids) :].tolist()


@torch.inference_mode()
def _gaps(model: Any, prompt_token_ids: list[int], token_ids: list[int]) -> list[float]:
    if not token_ids:
        return []
    logits = model(torch.tensor([prompt_token_ids + token_ids[:-1]])).logits[0, len(prompt_token_ids) - 1 :]
    claimed = logits.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    return ((logits.max(1).values - claimed) / logits.std(1)).tolist()


if __name__ == "__main__":
    main()
