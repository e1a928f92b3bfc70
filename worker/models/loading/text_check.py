"""A check at load of what smaller number formats cost: how they move a model's predictions of a text.

The model predicts the text before its weights and caches take fewer bits, and afterwards, so no second copy is in
memory. Random weights predict no text, and lose more than trained ones. So only a model that predicts the text well
enough is judged.
"""

from __future__ import annotations

import structlog
import torch
from torch import Tensor

from ....shared.errors import ModelLoadError
from ...config.engine_config import EngineConfig
from ..checks.divergence import Scores
from ..checks.kl_limits import QUALITY_TEXT, largest_kl
from ..checks.wide_products import wide_products
from ..forward import Forward
from .calibration import TextEncoder, run_prompts

log = structlog.get_logger(__name__)

# More characters than the tokens have, which no tokenizer should read in full.
_NUM_CHARACTERS = 4_000
# Tokens of the text, and those at its end whose logits are compared: 128 MiB for the largest vocabularies.
_NUM_TOKENS, _NUM_SCORED = 256, 128
# A trained model's perplexity is below this share of its vocabulary; a random model's is above the whole.
_TRAINED_SHARE = 0.1
# Nats. A trained model whose predictions move by so much computes something else.
_MAX_KL = 1.0


def check_prompt(encoder: TextEncoder, config: EngineConfig, max_model_len: int) -> list[int]:
    """Return the tokens for a ``TextCheck``; none if the formats are the model's own, if weights are random, if several
    ranks compute the model, or if its vocabulary has no two tokens of the text.
    """
    is_smaller = config.quantization is not None or config.eight_bit_cache is not None
    if not is_smaller or not config.needs_weights or config.num_ranks > 1 or config.is_grouped:
        return []
    text = QUALITY_TEXT.read_text(encoding="utf-8")[:_NUM_CHARACTERS]
    (prompt,) = encoder.encode([text])
    prompt = prompt[: min(_NUM_TOKENS, max_model_len)]
    return prompt if len(prompt) > 1 else []


class TextCheck:
    """The predictions of the unquantised ``forward`` for ``prompt``, and the comparison with those of another."""

    def __init__(self, forward: Forward, prompt: list[int]) -> None:
        self._prompt = prompt
        self._num_scored = min(_NUM_SCORED, len(prompt) - 1)
        self._plain = Scores()
        self._reference = self._plain.add_reference(*self._run(forward))

    def compare(self, forward: Forward, config: EngineConfig, vocab_size: int) -> None:
        """Report the divergence of ``forward``, the same model in the formats of ``config``.

        Raises:
            ModelLoadError: the model predicted the text, and now predicts something else.
        """
        scores = Scores()
        scores.add(*self._run(forward), self._reference)
        limit = largest_kl(config.quantization, config.eight_bit_cache)
        is_trained = self._plain.perplexity < _TRAINED_SHARE * vocab_size
        log.info(
            "quantization_checked",
            kl=round(scores.kl, 4),
            top1=round(scores.agreement, 3),
            perplexity=round(scores.perplexity, 2),
            perplexity_before=round(self._plain.perplexity, 2),
            is_trained=is_trained,
        )
        if is_trained and limit is not None and scores.kl > limit:
            log.warning("quantization_costly", kl=round(scores.kl, 4), limit=limit)
        if is_trained and not scores.kl <= _MAX_KL:
            formats = " and ".join(name for name in (config.quantization, config.eight_bit_cache) if name)
            raise ModelLoadError(
                f"in {formats} the model predicts another text: the KL divergence from itself is {scores.kl:.2f} nats "
                f"per token, and at most {_MAX_KL} is allowed; use a format with more bits"
            )

    def _run(self, forward: Forward) -> tuple[Tensor, Tensor]:
        """Return logits ``[N, V]``, and the tokens ``[N]`` that follow."""
        with wide_products():
            logits = run_prompts(forward, [self._prompt], slice(-self._num_scored - 1, -1))
        forward.commit()
        return logits, torch.tensor(self._prompt[-self._num_scored :])
