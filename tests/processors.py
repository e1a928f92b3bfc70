"""Logits processors as an operator may write them, for the tests; some of them are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.worker.engine.logits_processors import LogitsProcessor, ProcessedRequest


class Ban(LogitsProcessor):
    """Never these tokens."""

    name = "ban"

    def __init__(self, args: dict[str, Any], request: ProcessedRequest) -> None:
        super().__init__(args, request)
        if not args.get("token_ids"):
            raise ValueError("token_ids must be a list that is not empty")

    def apply(self, output_token_ids: Sequence[int], logits: Tensor) -> Tensor:
        logits[self.args["token_ids"]] = float("-inf")
        return logits


class Tired(LogitsProcessor):
    """The more often a token was there, the less likely it is: all follows from the tokens, of the prompt as well."""

    name = "tired"

    def apply(self, output_token_ids: Sequence[int], logits: Tensor) -> Tensor:
        tokens = [*self.request.prompt_token_ids, *output_token_ids]
        counts = torch.bincount(torch.tensor(tokens), minlength=len(logits)).to(logits.device)
        return logits - float(self.args["by"]) * counts


class Broken(LogitsProcessor):
    """Processor that fails at the third token, in the given way."""

    name = "broken"

    def apply(self, output_token_ids: Sequence[int], logits: Tensor) -> Tensor:
        if len(output_token_ids) < 2:
            return logits
        match self.args["how"]:
            case "raises":
                raise KeyError("no such thing")
            case "nothing":
                return torch.full_like(logits, float("-inf"))
            case "nan":
                return logits * float("nan")
            case "short":
                return logits[:3]
        return None  # type: ignore[return-value]  # the mistake


class Nameless(LogitsProcessor):
    """Cannot be chosen."""

    def apply(self, output_token_ids: Sequence[int], logits: Tensor) -> Tensor:
        return logits


def wanting(**processors: dict[str, Any]) -> dict[str, Any]:
    """``extra_args`` that choose processors."""
    return {"logits_processors": processors}
