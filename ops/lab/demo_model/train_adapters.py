"""Train the adapters of the demo model, or check the existing ones.

    python -m penstock.ops.lab.demo_model.train_adapters
    python -m penstock.ops.lab.demo_model.train_adapters --evaluate

The published adapters are from the first command with its defaults: 300 steps each, two or three minutes on a core that
is shared (torch 2.13.0, transformers 5.23.0). Exact match of greedy answers on all held-out questions about numbers
below a hundred, with the weights as they are in the files:

                 add (500)   spell (5)   count (53)
    digits        91.00 %    100.00 %     98.11 %
    downwards    100.00 %    100.00 %     94.34 %
    loud         100.00 %    100.00 %     98.11 %

Seeds are fixed; another processor or torch version rounds differently and ends at other weights.
"""

from __future__ import annotations

import argparse
import time
from random import Random

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from ...demo.styles import ADAPTERS, BELOW, STYLES, draw_small
from ...demo.task import TASKS, Question, held_out_questions, parse
from ..peft_folder import LINEAR_LAYERS, merge_adapter, write_adapter
from .train import GROUPS, MODEL_DIR, Batch, encode_batch, learning_rate, train_step, wrong_answers


class LowRank(nn.Module):
    """A weight ``[N, K]`` with the product of ``b [N, R]`` and ``a [R, K]`` added, ``alpha / R`` times."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.scale = alpha / rank

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.b @ self.a)


def adapt(model: LlamaForCausalLM, rank: int, alpha: int) -> dict[str, LowRank]:
    """Freeze ``model``, and give its linear layers matrices of their own; those by the layers' names."""
    model.requires_grad_(False)
    low_ranks = {}
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in LINEAR_LAYERS:
            low_ranks[name] = LowRank(layer, rank, alpha)
            parametrize.register_parametrization(layer, "weight", low_ranks[name])
    return low_ranks


def draw_batch(tokenizer: PreTrainedTokenizerFast, style: str, rng: Random, share: int) -> list[Batch]:
    """Draw one step's questions, answered in ``style``; ``1 / share`` of those in a step of the model's training."""
    answer = STYLES[style]
    return [
        encode_batch(
            tokenizer,
            [
                Question(task, question.prompt, answer(question))
                for task, count in group.items()
                for question in (draw_small(task, rng, held_out=False) for _ in range(count // share))
            ],
        )
        for group in GROUPS
    ]


def train(style: str, args: argparse.Namespace) -> None:
    """Train one adapter, and write its folder."""
    torch.manual_seed(args.seed)
    rng, tokenizer = Random(args.seed), AutoTokenizer.from_pretrained(MODEL_DIR)
    model = LlamaForCausalLM.from_pretrained(MODEL_DIR, attn_implementation="eager")
    layers = adapt(model, args.rank, args.alpha)
    matrices = [matrix for layer in layers.values() for matrix in layer.parameters()]
    optimizer = torch.optim.AdamW(matrices, lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    started_at = time.monotonic()
    num_steps = args.num_steps
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps, args.learning_rate)
        loss = train_step(model, optimizer, draw_batch(tokenizer, style, rng, args.share))
        if step % 50 == 0 or step == num_steps - 1:
            print(f"{style}: step {step} loss {loss:.4f} {time.monotonic() - started_at:.0f} s", flush=True)
    # In float16, whose 11 bits change no answer.
    halves = {name: (layer.a.detach().half(), layer.b.detach().half()) for name, layer in layers.items()}
    write_adapter(ADAPTERS / style, halves, args.rank, args.alpha)


def merged(style: str) -> LlamaForCausalLM:
    """Return the demo model with an adapter of the repository merged into its weights."""
    model = LlamaForCausalLM.from_pretrained(MODEL_DIR).eval()
    merge_adapter(model, ADAPTERS / style)
    return model


def evaluate(style: str, num_questions: int) -> None:
    """Print the exact matches on held-out questions by task; all of them where there are fewer than asked for."""
    model, tokenizer = merged(style), AutoTokenizer.from_pretrained(MODEL_DIR)
    for task in TASKS:
        questions = [one for one in held_out_questions(task) if max(parse(one.prompt)[1]) < BELOW]
        sample = Random(0).sample(questions, min(num_questions, len(questions)))
        right = [Question(task, question.prompt, STYLES[style](question)) for question in sample]
        wrong = wrong_answers(model, tokenizer, right)
        print(f"{style}, {task}: {1 - len(wrong) / len(right):.2%} of {len(right)} held-out questions", flush=True)
        for question, text in wrong[:3]:
            print(f"  {question.prompt}{text} (should be {question.answer})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluate", action="store_true", help="check the folders instead of training")
    parser.add_argument("--styles", nargs="+", choices=list(STYLES), default=list(STYLES))
    parser.add_argument("--num-questions", type=int, default=500, help="held-out questions per task to evaluate on")
    parser.add_argument("--num-steps", type=int, default=300)
    parser.add_argument("--share", type=int, default=4, help="1 in so many of the questions of a step of the model")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--alpha", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # as the model's training
    for style in args.styles:
        if not args.evaluate:
            train(style, args)
        evaluate(style, args.num_questions)


if __name__ == "__main__":
    main()
