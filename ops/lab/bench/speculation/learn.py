"""``python -m penstock.ops.lab.bench.speculation.learn``: gives a random model answers that it knows by heart.

What guesses save depends on two things: how many come true, which is a matter of the texts, and what a step costs,
which is a matter of the model's shape. So no language model is needed that would have to be downloaded. A small model
of two layers learns the answers of ``texts`` word for word, within a minute or two. Then it becomes a part of a model
of random weights and a larger shape: the numbers beside it in its vectors are zero, and all other layers, which are
computed as ever, add nothing. That model costs what its shape costs, and says what the small one has learnt.
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

from .texts import Asked, all_asked

VOCAB_SIZE = 1024
# A quarter of the large one's hidden size, so that RMSNorm's factor between them, 2, is exact.
SHARE = 4
NUM_LAYERS = 2
MAX_STEPS = 600
LEARNING_RATE = 4e-3
# By so much the right token leads everywhere, also those that the small model does not have: far more than bfloat16
# rounds.
MIN_LEAD = 3.0
# Ids that the small model does not have are so much of one that it has. They are never said, but the lean way reads how
# a model computes from what it makes of some of them, and nothing could be read from zeros.
_NEVER_SAID = 1 / 64
_EVALUATE_EVERY = 10


def train_tokenizer(asked: list[Asked]) -> Tokenizer:
    """Byte-level BPE of the texts, in which most words are one token, as in those of large vocabularies."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator([text for one in asked for text in (one.prompt, one.answer)], trainer)
    return tokenizer


def batch_of(tokenizer: Tokenizer, asked: list[Asked]) -> tuple[Tensor, Tensor]:
    """Tokens and labels ``[B, T]``; -100 where nothing is to be learnt: prompts, and what fills up."""
    rows = [(tokenizer.encode(one.prompt).ids, tokenizer.encode(one.answer).ids) for one in asked]
    shape = len(rows), max(len(prompt) + len(answer) for prompt, answer in rows)
    token_ids, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, -100)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        token_ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return token_ids, labels


def learn(large: LlamaConfig, tokenizer: Tokenizer, asked: list[Asked]) -> LlamaForCausalLM:
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
    token_ids, labels = batch_of(tokenizer, asked)
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
    """By how much the right tokens exceed all others at the least; ``logits [N, V]``, ``expected [N]``."""
    at = expected[:, None]
    right = logits.gather(1, at)[:, 0]
    others = logits.scatter(1, at, float("-inf")).amax(1)
    never_said = logits.abs().amax(1) * _NEVER_SAID
    return float((right - torch.maximum(others, never_said)).min())


@torch.no_grad()
def become_part(large: LlamaForCausalLM, small: LlamaForCausalLM) -> None:
    """Make ``large`` say what ``small`` says, at its own cost."""
    # The mean of squares is over SHARE times as many numbers, so what is normed is sqrt(SHARE) times as large.
    norm_factor = SHARE**-0.5
    of_small = dict(small.named_parameters())
    for name, weight in large.named_parameters():
        given = of_small.get(name)
        if name.endswith(("o_proj.weight", "down_proj.weight")) or name == "model.embed_tokens.weight":
            weight.zero_()
        if given is None:
            continue
        if weight.ndim == 1:
            weight.zero_()
            weight[: len(given)] = given * norm_factor
        else:
            weight[: given.shape[0], : given.shape[1]] = given
            if name == "model.embed_tokens.weight":
                which = torch.arange(len(given), len(weight)) % len(given)
                weight[len(given) :, : given.shape[1]] = given[which] * _NEVER_SAID
            # Of what the large one computes beside it, nothing is read: rows and columns there stay as they are.


def main() -> int:
    """Parse the command line, learn, and write into the folder of a model with random weights."""
    parser = argparse.ArgumentParser(prog="penstock.ops.lab.bench.speculation.learn", description=__doc__)
    parser.add_argument("--model", required=True, type=Path, metavar="DIR", help="is replaced")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    asked = all_asked()
    tokenizer = train_tokenizer(asked)
    large = LlamaForCausalLM.from_pretrained(arguments.model)
    become_part(large, learn(large.config, tokenizer, asked))
    # Nobody says it; a grammar needs a token that could follow its end.
    large.config.eos_token_id = VOCAB_SIZE
    large.save_pretrained(arguments.model)
    tokenizer.save(str(arguments.model / "tokenizer.json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
