"""All texts of a step in one row ``[1, T]`` of a model in which each token attends to its whole text, both ways.

Nothing is kept from step to step, so there is no cache, and a text is computed whole or not at all. Texts follow each
other in the row without padding, and each attends to itself only. transformers' own rule says which keys a query
attends to; it is asked for positions within the text.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ....kernels.paged_attention import MaskRule
from ....shared.errors import ModelLoadError
from ..attention.call import AttentionCall
from ..attention.registry import register_attention
from ..checks.conformance import tolerance_of
from ..forward import ModelInput, TokenAdapters
from ..modes.packed import install_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SEQUENCE_LENS = (6, 9, 5)
# Two computations that round differently are each this far from the exact one.
_ROUNDING_FACTOR = 2.0
# An error of this size would not be seen.
_MAX_ROUNDING = 0.25

_NAME_NUMBERS = itertools.count()


class TextAttention:
    """Attention within each text of a packed row. Call ``begin`` for every step."""

    def __init__(self) -> None:
        self.name = f"penstock_texts_{next(_NAME_NUMBERS)}"
        self._lens: list[int] = []
        self._masks: dict[tuple[int, int], tuple[MaskRule, Tensor | None]] = {}
        register_attention(self.name, self._attend_to_text, return_rule)

    def begin(self, lens: list[int]) -> None:
        """Set the lengths of the texts of the next forward."""
        self._lens = lens
        self._masks = {}

    def _attend_to_text(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: MaskRule | None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attend as transformers' attention functions do: ``[1, H, T, D]`` in, ``([1, T, H, DV], None)`` out."""
        is_grouped = query.shape[1] != key.shape[1]
        parts = [
            nn.functional.scaled_dot_product_attention(
                *texts, attn_mask=self._mask(attention_mask, texts[0]), scale=scaling, enable_gqa=is_grouped
            )
            for texts in zip(*(each.split(self._lens, dim=2) for each in (query, key, value)), strict=True)
        ]
        return torch.cat(parts, dim=2).transpose(1, 2), None

    def _mask(self, rule: MaskRule | None, query: Tensor) -> Tensor | None:
        """Return which keys each query of a text attends to, ``[L, L]``; None for all."""
        if rule is None:
            return None
        length = query.shape[2]
        # The rule is referenced, so that no other rule can get its id.
        _, mask = self._masks.get((id(rule), length), (None, None))
        if (id(rule), length) not in self._masks:
            positions = torch.arange(length, device=query.device)
            is_visible = torch.as_tensor(rule(0, 0, positions[:, None], positions[None])).expand(length, length)
            mask = None if bool(is_visible.all()) else is_visible
            self._masks[id(rule), length] = rule, mask
        return mask


def return_rule(*_: Any, mask_function: MaskRule, **__: Any) -> MaskRule:
    """Return the rule itself, in the signature of transformers' mask functions."""
    return mask_function


@dataclass(frozen=True)
class Texts:
    """Consecutive whole texts.

    Args:
        token_ids, positions: ``[T]``, positions from 0 in each text.
        lens: number of tokens of each.
        types, token_lora: ``[T]``, see ``token_types`` and ``token_lora`` of ``ModelInput``.
    """

    token_ids: Tensor
    positions: Tensor
    lens: list[int]
    types: Tensor | None = None
    token_lora: Tensor | None = None

    @classmethod
    def of(cls, sequences: list[Tensor]) -> Texts:
        """Return the texts with the token ids of ``sequences``."""
        positions = torch.cat([torch.arange(len(sequence), device=sequence.device) for sequence in sequences])
        return cls(torch.cat(sequences), positions, [len(sequence) for sequence in sequences])


class EncoderForward:
    """A ``forward.Forward`` that returns hidden states of tokens and has no cache.

    Args:
        first_position: of a text; ``encoder_forward`` determines it for models that do not count from 0.
    """

    mode = "encoder"
    attention_backend = "torch"
    # See ``LoadedModel``.
    enough_tokens: int | None = None
    keeps_state = False
    takes_embeds = False
    bytes_per_token = 0
    bytes_per_request = 0

    def __init__(self, module: PreTrainedModel, attention: TextAttention, first_position: int) -> None:
        self.network = module
        self.first_position = first_position
        self.attention = attention
        self.token_adapters = TokenAdapters()
        names = set(inspect.signature(module.base_model.forward).parameters)
        self._takes_types = "token_type_ids" in names
        self._device = module.device

    @property
    def max_text_len(self) -> int | None:
        """Number of positions of the model for a text; None if its configuration has no limit."""
        limit = getattr(self.network.config, "max_position_embeddings", None)
        return None if limit is None else limit - self.first_position

    @property
    def attention_calls(self) -> list[AttentionCall]:
        return []

    @property
    def caches(self) -> list[Tensor]:
        return []

    def network_of(self, module: PreTrainedModel) -> nn.Module:
        return module

    def allocate(self, num_blocks: int, block_size: int, num_slots: int, device: torch.device) -> None:
        """Do nothing, since there is no cache."""

    def run(self, step: ModelInput) -> Tensor:
        texts = Texts(step.token_ids, step.positions, step.batch.query_lens, step.token_types, step.token_lora)
        return self._states(texts, step.logit_rows)

    def commit(self) -> None:
        """Do nothing, since a step keeps no state."""

    def profile(self, num_tokens: int, num_logit_rows: int) -> None:
        longest = self.max_text_len or num_tokens
        lens = [min(longest, num_tokens - start) for start in range(0, num_tokens, longest)]
        texts = Texts.of([torch.zeros(size, dtype=torch.int64, device=self._device) for size in lens])
        self._states(texts, torch.arange(num_logit_rows, device=self._device))

    def states_of(self, sequences: list[Tensor]) -> Tensor:
        """Return hidden states of whole texts in one row."""
        texts = Texts.of(sequences)
        return self._states(texts, torch.arange(len(texts.positions), device=texts.positions.device))

    def _states(self, texts: Texts, rows: Tensor) -> Tensor:
        """Return hidden states ``[R, H]`` of the tokens ``rows``, ascending."""
        self.attention.begin(texts.lens)
        self.token_adapters.begin(texts.token_lora)
        return self._run_base(self.network.base_model, texts)[rows]

    def _run_base(self, base: nn.Module, texts: Texts) -> Tensor:
        """Return the output ``[T, H]`` of ``base``, the base model or a module with the same arguments, for
        ``texts``.
        """
        inputs = {"input_ids": texts.token_ids[None], "position_ids": texts.positions[None] + self.first_position}
        if self._takes_types:
            types = torch.zeros_like(texts.token_ids) if texts.types is None else texts.types
            inputs["token_type_ids"] = types[None]
        return base(**inputs).last_hidden_state[0]


class EncoderReference:
    """Hidden states of a few texts, each computed alone by ``module``, whose attention is still its own.

    Attributes:
        rounding: how far rounding moves the states of the module itself, where ``allow_for_rounding`` measured it.
    """

    def __init__(self, module: PreTrainedModel, vocab_size: int) -> None:
        padding = getattr(module.config, "pad_token_id", None)
        ids = (torch.arange(3, 3 + sum(_SEQUENCE_LENS)) * 7919 % vocab_size).tolist()
        # Models like RoBERTa count positions of padding differently.
        usable = [token_id if token_id != padding else (token_id + 1) % vocab_size for token_id in ids]
        token_ids = torch.tensor(usable, device=module.device)
        self.sequences = list(token_ids.split(_SEQUENCE_LENS))
        self.states = torch.cat(
            [module.base_model(input_ids=sequence[None]).last_hidden_state[0] for sequence in self.sequences]
        )
        self.dtype = module.dtype
        self.rounding = 0.0
        self._vocab_size = vocab_size
        self._own_attention = module.config._attn_implementation or "eager"

    def error_of(self, forward: EncoderForward) -> float:
        """Return the largest ``|difference| / |state|`` of the same texts in one row."""
        return _largest_error(forward.states_of(self.sequences), self.states)

    def limit(self, tolerance: float | None) -> float:
        """Return the largest error that counts as rounding.

        Args:
            tolerance: of most models in the format that is tried; None for that of the module's dtype.
        """
        usual = tolerance_of(self.dtype) if tolerance is None else tolerance
        return max(usual, _ROUNDING_FACTOR * self.rounding)

    def allow_for_rounding(self, forward: EncoderForward, subject: str) -> None:
        """Measure ``rounding`` by a copy of the module in float32, in which ``forward`` must compute the same.

        Few models need it, since it takes the memory of the copy.

        Raises:
            ModelLoadError: rounding moves the states so far that no error could be seen.
        """
        wide: Any = copy.deepcopy(forward.network).float()
        wide.set_attn_implementation(self._own_attention)
        exact = EncoderReference(wide, self._vocab_size)
        attention = TextAttention()
        install_attention(wide, attention.name)
        exact.check(EncoderForward(wide, attention, forward.first_position), None, subject)
        rounding = _largest_error(self.states, exact.states)
        if rounding > _MAX_ROUNDING:
            raise ModelLoadError(
                f"{subject}: rounding to {str(self.dtype).removeprefix('torch.')} moves its hidden states by "
                f"{rounding:.0%}; use --dtype float32"
            )
        self.rounding = rounding

    def check(self, forward: EncoderForward, tolerance: float | None, subject: str) -> None:
        """Raise ``ModelLoadError`` if they differ by more than rounding."""
        error = self.error_of(forward)
        if error > self.limit(tolerance):
            dtype = str(self.dtype).removeprefix("torch.")
            remedy = f", and rounding to {dtype} alone moves them by {self.rounding:.1%}; use --dtype float32"
            raise ModelLoadError(
                f"{subject}: hidden states of texts that are computed together differ by {error:.1%} from the model's "
                f"own{remedy if self.rounding else ''}"
            )


def _largest_error(states: Tensor, expected: Tensor) -> float:
    error = (states.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1).clamp(min=1e-6)
    return error.nan_to_num(torch.inf).max().item()


def is_bidirectional(module: PreTrainedModel, vocab_size: int) -> bool:
    """Whether later tokens change the hidden state of the first token."""
    texts = torch.tensor([[3, 4, 5, 6], [3, 7, 8, 9]], device=module.device) % vocab_size
    first, other = (module.base_model(input_ids=text[None]).last_hidden_state[0, 0] for text in texts)
    return not torch.allclose(first, other, rtol=1e-3, atol=1e-3 * float(first.abs().max()))


def encoder_forward(module: PreTrainedModel, architecture: str, reference: EncoderReference) -> EncoderForward:
    """Return the forward of ``module`` for texts in one row.

    Positions are tried from 0, and from the first position of models like RoBERTa.

    Raises:
        ModelLoadError: it does not use transformers' attention interface, or other texts change its results.
    """
    attention = TextAttention()
    subject = f"{architecture} cannot be served as an encoder"
    try:
        install_attention(module, attention.name)
        padding = getattr(module.config, "pad_token_id", None)
        starts = [0] if padding is None else [0, padding + 1]
        forwards = [EncoderForward(module, attention, start) for start in starts]
        # From 0 if that conforms: for models with relative positions all starts are equal.
        forward = next(
            (each for each in forwards if reference.error_of(each) <= tolerance_of(reference.dtype)), forwards[-1]
        )
    except ModelLoadError as error:
        raise ModelLoadError(f"{subject}: {error}") from error
    except Exception as error:  # any exception of the architecture's own code
        raise ModelLoadError(f"{subject}: {type(error).__name__}: {error}") from error
    if module.dtype is not torch.float32 and reference.error_of(forward) > reference.limit(None):
        forward = min(forwards, key=reference.error_of)
        reference.allow_for_rounding(forward, subject)
    reference.check(forward, None, subject)
    return forward
