"""Train the embedding model of the demo from scratch, or check the existing folder.

    python -m penstock.ops.lab.demo_model.train_embedder
    python -m penstock.ops.lab.demo_model.train_embedder --evaluate

It brings a number in digits and the same number in words together: "407" and "four hundred seven". The folder,
``ops/demo/embedder/``, is one of sentence-transformers: a BERT, the mean of its tokens, length one.

The published model is the first command with its defaults: 300 steps, about a minute and a half of one core (Intel Xeon
with AMX, torch 2.13.0, transformers 5.23.0). Retrieval of 519 held-out numbers among 10000:

    digits find words   99.04 %
    words find digits   97.88 %

Seeds are fixed; another processor or torch version rounds differently and ends at other weights.
"""

import argparse
import json
import time
import zlib
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from ...demo.task import HELD_OUT_ONE_IN, MAX_SPELLED, number_words
from .tokenizer import PAD_ID, train_tokenizer
from .train import learning_rate

MODEL_DIR = Path(__file__).parents[2] / "demo" / "embedder"
TEMPERATURE = 0.05
SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def is_held_out(number: int) -> bool:
    """Return whether a number is excluded from training."""
    return zlib.crc32(f"embed {number}".encode()) % HELD_OUT_ONE_IN == 0


def draw_numbers(count: int, rng: Random) -> list[int]:
    """Draw different numbers for training. Many share digits with another, since those are hard to distinguish."""
    chosen: set[int] = set()
    while len(chosen) < count:
        number = rng.randrange(10 ** rng.choice((2, 3, 4, 4)))
        digits = list(f"{number:04d}")
        rng.shuffle(digits)
        near = {number, int("".join(digits)), min(MAX_SPELLED, number + rng.choice((1, 10, 100, 1000)))}
        chosen |= {one for one in near if not is_held_out(one)}
    return sorted(chosen)[:count] if len(chosen) == count else rng.sample(sorted(chosen), count)


def embed(model: BertModel, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """Embeddings ``[B, H]`` of length one: the mean over the tokens of each text."""
    token_ids = tokenizer(texts)["input_ids"]
    shape = len(texts), max(map(len, token_ids))
    input_ids, mask = torch.full(shape, PAD_ID), torch.zeros(shape, dtype=torch.int64)
    for row, ids in enumerate(token_ids):
        input_ids[row, : len(ids)], mask[row, : len(ids)] = torch.tensor(ids), 1
    states = model(input_ids=input_ids, attention_mask=mask).last_hidden_state * mask[..., None]
    return torch.nn.functional.normalize(states.sum(1) / mask.sum(1, keepdim=True), dim=-1)


def train(args: argparse.Namespace) -> None:
    """Train tokenizer and model, and write the folder."""
    torch.manual_seed(args.seed)
    rng, tokenizer = Random(args.seed), train_tokenizer(args.seed)
    model = BertModel(BertConfig(vocab_size=len(tokenizer), pad_token_id=PAD_ID, **SIZES), add_pooling_layer=False)
    model.set_attn_implementation("eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.01)
    print(f"{model.num_parameters():,} parameters, vocabulary {len(tokenizer)}", flush=True)
    started_at = time.monotonic()
    for step in range(args.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.num_steps, args.learning_rate)
        numbers = draw_numbers(args.batch, rng)
        embeddings = embed(model, tokenizer, [*map(str, numbers), *map(number_words, numbers)])
        digits, words = embeddings.split(args.batch)
        scores, own = digits @ words.T / TEMPERATURE, torch.arange(args.batch)
        loss = torch.nn.functional.cross_entropy(scores, own) + torch.nn.functional.cross_entropy(scores.T, own)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == args.num_steps - 1:
            print(f"step {step} loss {loss.item():.4f} {time.monotonic() - started_at:.0f} s", flush=True)
    save(model.eval(), tokenizer)
    evaluate()


def save(model: BertModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the folder, with the files of sentence-transformers."""
    model.save_pretrained(MODEL_DIR)
    tokenizer.backend_tokenizer.save(str(MODEL_DIR / "tokenizer.json"))
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (MODEL_DIR / "modules.json").write_text(json.dumps(modules, indent=2) + "\n")
    (MODEL_DIR / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": SIZES["hidden_size"], "pooling_mode_mean_tokens": True}
    (MODEL_DIR / "1_Pooling" / "config.json").write_text(json.dumps(pooling, indent=2) + "\n")


@torch.inference_mode()
def evaluate() -> None:
    """Print how often a held-out number in digits finds its words first, and the other way round."""
    model = BertModel.from_pretrained(MODEL_DIR, add_pooling_layer=False).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(MODEL_DIR / "tokenizer.json"))
    held_out = [number for number in range(MAX_SPELLED + 1) if is_held_out(number)]
    for label, query, target in (("digits find words", str, number_words), ("words find digits", number_words, str)):
        targets = torch.cat(
            [embed(model, tokenizer, [target(n) for n in range(at, at + 500)]) for at in range(0, 10_000, 500)]
        )
        best = (embed(model, tokenizer, [query(number) for number in held_out]) @ targets.T).argmax(-1).tolist()
        num_right = sum(number == first for number, first in zip(held_out, best, strict=True))
        print(f"{label}: {num_right / len(held_out):.2%} of {len(held_out)} held-out numbers, among 10000", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluate", action="store_true", help="check the folder instead of training")
    parser.add_argument("--num-steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64, help="numbers in a step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    evaluate() if args.evaluate else train(args)


if __name__ == "__main__":
    main()
