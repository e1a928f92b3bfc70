"""``python -m penstock.ops.lab.bench.speculation.learn``: trains a random model to give known answers.

The gain of speculation depends on the acceptance rate, a property of the texts, and on the cost of a step, a property
of the model's shape. So no language model must be downloaded. A small model of two layers learns the answers of
``texts`` word for word, within a minute or two. Then it is embedded in a random model of a larger shape: the other
numbers of its vectors are zero, and all other layers are computed but add nothing. That model has the cost of its
shape and the outputs of the small one.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from .texts import Exercise, all_exercises

VOCAB_SIZE = 1024
# A quarter of the large one's hidden size, so that RMSNorm's factor between them, 2, is exact.
SHARE = 4
NUM_LAYERS = 2
MAX_STEPS = 600
LEARNING_RATE = 4e-3
# The lead of the right token everywhere, also over tokens that the small model lacks: far more than bfloat16
# rounds.
MIN_LEAD = 3.0
# Ids that the small model does not have are so much of one that it has. They are never said, but the lean way reads how
# a model computes from what it makes of some of them, and nothing could be read from zeros.
_NEVER_SAID = 1 / 64
_EVALUATE_EVERY = 10


def train_tokenizer(questions: list[Exercise]) -> Tokenizer:
    """Byte-level BPE of the texts, in which most words are one token, as in those of large vocabularies."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator([text for one in questions for text in (one.prompt, one.answer)], trainer)
    return tokenizer


def batch_of(tokenizer: Tokenizer, questions: list[Exercise]) -> tuple[Tensor, Tensor]:
    """Return tokens and labels ``[B, T]``; the label is -100 for prompts and padding, which are not learnt."""
    rows = [(tokenizer.encode(one.prompt).ids, tokenizer.encode(one.answer).ids) for one in questions]
    shape = len(rows), max(len(prompt) + len(answer) for prompt, answer in rows)
    token_ids, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, -100)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        token_ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return token_ids, labels


def learn(large: LlamaConfig, tokenizer: Tokenizer, questions: list[Exercise]) -> LlamaForCausalLM:
    """Return a small model that knows all answers.

    Raises:
        RuntimeError: it has not learnt them within ``MAX_STEPS``.
    """
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=large.hidden_size // SHARE,
            intermediate_size=large.intermediate_size // SHARE,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=large.num_attention_heads,
            num_key_value_heads=large.num_key_value_heads,
            head_dim=large.hidden_size // large.num_attention_heads,
            max_position_embeddings=large.max_position_embeddings,
            rms_norm_eps=large.rms_norm_eps * SHARE,
            tie_word_embeddings=True,
            initializer_range=0.05,
        )
    )
    token_ids, labels = batch_of(tokenizer, questions)
    expected = labels[:, 1:].flatten()
    is_answer = expected != -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    started_s = time.monotonic()
    for step in range(MAX_STEPS):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20) * (1 - 0.8 * step / MAX_STEPS)
        logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1].flatten(0, 1)[is_answer]
        loss = functional.cross_entropy(logits, expected[is_answer])
        if step % _EVALUATE_EVERY == 0:
            lead = _least_lead(logits.detach(), expected[is_answer])
            print(f"step {step}, loss {loss.item():.4f}, lead {lead:.2f}, {time.monotonic() - started_s:.0f} s")
            if lead >= MIN_LEAD:
                return model
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    raise RuntimeError(f"the answers were not learnt within {MAX_STEPS} steps")


def _least_lead(logits: Tensor, expected: Tensor) -> float:
    """Return the least lead of the right tokens over all others; ``logits [N, V]``, ``expected [N]``."""
    at = expected[:, None]
    right = logits.gather(1, at)[:, 0]
    others = logits.scatter(1, at, float("-inf")).amax(1)
    never_said = logits.abs().amax(1) * _NEVER_SAID
    return float((right - torch.maximum(others, never_said)).min())


@torch.no_grad()
def become_part(large: LlamaForCausalLM, small: LlamaForCausalLM) -> None:
    """Give ``large`` the outputs of ``small``, at its own cost."""
    # The mean of squares is over SHARE times as many numbers, so what is normed is sqrt(SHARE) times as large.
    norm_factor = SHARE**-0.5
    of_small = dict(small.named_parameters())
    for name, weight in large.named_parameters():
        source = of_small.get(name)
        if name.endswith(("o_proj.weight", "down_proj.weight")) or name == "model.embed_tokens.weight":
            weight.zero_()
        if source is None:
            continue
        if weight.ndim == 1:
            weight.zero_()
            weight[: len(source)] = source * norm_factor
        else:
            weight[: source.shape[0], : source.shape[1]] = source
            if name == "model.embed_tokens.weight":
                which = torch.arange(len(source), len(weight)) % len(source)
                weight[len(source) :, : source.shape[1]] = source[which] * _NEVER_SAID
            # Other numbers of the large model are never read, so their rows and columns stay random.


def main() -> int:
    """Parse the command line, learn, and write into the folder of a model with random weights."""
    parser = argparse.ArgumentParser(prog="penstock.ops.lab.bench.speculation.learn", description=__doc__)
    parser.add_argument("--model", required=True, type=Path, metavar="DIR", help="is replaced")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    questions = all_exercises()
    tokenizer = train_tokenizer(questions)
    large = LlamaForCausalLM.from_pretrained(arguments.model)
    become_part(large, learn(large.config, tokenizer, questions))
    # Never generated, but a grammar needs a token that could follow its end.
    large.config.eos_token_id = VOCAB_SIZE
    large.save_pretrained(arguments.model)
    tokenizer.save(str(arguments.model / "tokenizer.json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
