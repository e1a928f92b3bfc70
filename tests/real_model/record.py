"""Writes the tables that the tests with real models compare with: tokens by llama.cpp, answers by transformers.

Run ``python tests/real_model/record.py MODEL.gguf`` where the package ``xllamacpp`` is installed, and ``gguf``, which
transformers' reader of such files needs.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import torch
import transformers
import xllamacpp  # pyright: ignore[reportMissingImports]  # only this program needs it
from texts import PROMPTS, token_texts

from penstock.worker.models.checkpoint.folder import resolve_model_folder
from penstock.worker.text.tokenizer import TextCodec

HERE = Path(__file__).parent
MAX_TOKENS = 48
# In standard float32 two orders of summing differ by about 1e-4. An answer is cut before a closer decision than this.
MIN_MARGIN = 0.01


def tokens_by_llama_cpp(path: Path) -> list[list[int]]:
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 64
    server = xllamacpp.Server(params)
    tables = []
    for text in token_texts():
        body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", body)
        with urllib.request.urlopen(request) as response:
            tables.append(json.load(response)["tokens"])
    return tables


@torch.inference_mode()
def answers_by_transformers(path: Path) -> list[dict[str, list[int]]]:
    """Return prompts with greedy answers in float32."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    codec = TextCodec.load(resolve_model_folder(str(path)))
    answers = []
    for prompt in PROMPTS:
        prompt_ids = codec.encode_chat([{"role": "user", "content": prompt}], None)
        generated = model.generate(
            torch.tensor([prompt_ids]),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        output_ids = generated.sequences[0, len(prompt_ids) :].tolist()
        best = [torch.topk(torch.log_softmax(logits[0], -1), 2).values for logits in generated.logits]
        close = (index for index, (first, second) in enumerate(best) if first - second < MIN_MARGIN)
        output_ids = output_ids[: next(close, len(output_ids))]
        answers.append({"prompt": prompt_ids, "output": output_ids})
    return answers


def main(path: Path) -> None:
    (HERE / "tokens.json").write_text(_lines(tokens_by_llama_cpp(path)))
    (HERE / "answers.json").write_text(_lines(answers_by_transformers(path)))


def _lines(items: list) -> str:
    """Return JSON with a line for each item."""
    return "[\n" + ",\n".join(json.dumps(item, separators=(",", ":")) for item in items) + "\n]\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
