"""Four-bit weights whose rounding errors compensate each other, for the inputs that a text gives to their layers.

A layer is packed when the first step of the text reaches it, from the inputs of that step. Layers before it are packed
by then, so it also makes up for their errors. Only the inputs of one layer are in memory at a time, and plain weights
are freed one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from ....kernels.huge_pages import Arena
from ....kernels.linear.feedback import error_feedback
from ....kernels.paged_attention import PagedBatch
from ...config.engine_config import EngineConfig
from ..checkpoint.folder import TOKENIZER_FILE
from ..checkpoint.tokenizer_folder import tokenizer_folder
from ..checks.wide_products import wide_products
from ..forward import Forward, ModelInput
from ..placing.packed_linear import linear_layers_of, pack_in_four_bits, takes_four_bits

_TEXT = Path(__file__).with_name("calibration.txt")
# Between the prompts of the text.
_SEPARATOR = "\n----\n"
_MAX_PROMPT_LEN = 512
# Of a prompt of different tokens, since the text may have few tokens that a model knows.
_NUM_OTHER_TOKENS = 64
_BLOCK_SIZE = 16


class TextEncoder:
    """Encodes texts by the tokenizer in ``folder``, without tokens that the model does not have. It reads the tokenizer
    once, when the first text needs it: a large one takes seconds.
    """

    def __init__(self, folder: Path, config: EngineConfig, vocab_size: int) -> None:
        self._folder = folder
        self._config = config
        self.vocab_size = vocab_size

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text."""
        return [
            [token_id for token_id in self._tokenizer.encode(text).ids if token_id < self.vocab_size] for text in texts
        ]

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        folder = tokenizer_folder(self._folder, self._config.trust_remote_code)
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


def calibration_prompts(encoder: TextEncoder, config: EngineConfig, max_model_len: int) -> list[list[int]]:
    """Return the prompts by which ``pack_by_examples`` packs the model of ``encoder``; none if its weights need
    none.
    """
    if not config.has_four_bit_weights or config.device != "cpu":
        return []
    prompts = encoder.encode(_TEXT.read_text(encoding="utf-8").split(_SEPARATOR))
    prompts.append(varied_prompt(encoder.vocab_size, _NUM_OTHER_TOKENS))
    max_len = min(_MAX_PROMPT_LEN, max_model_len)
    return [prompt[:max_len] for prompt in prompts if prompt]


def varied_prompt(vocab_size: int, num_tokens: int) -> list[int]:
    """Return a prompt of different tokens."""
    return [(1 + position) * 7919 % vocab_size for position in range(num_tokens)]


def do_not_report() -> None:
    """Report nothing."""


def pack_by_examples(
    forward: Forward,
    prompts: Sequence[Sequence[int]],
    quantization: str = "int4",
    report: Callable[[], None] = do_not_report,
) -> None:
    """Pack the linear layers of ``forward`` that take four bits, by their inputs for ``prompts``.

    Layers that the prompts do not reach, such as unused experts, stay plain. Caches are allocated for the prompts.

    Args:
        quantization: one of ``FOUR_BIT_FORMATS``.
        report: called after each layer. All layers of a large model may take longer than the load timeout.
    """
    _ByExamples(forward.network, quantization, report).run(forward, prompts)


class _LogitsNotNeeded(Exception):
    """Ends the step at the output layer: logits of all tokens would take more memory than the model."""


class _ByExamples:
    """Replaces each layer of ``network`` when it is first called.

    Args:
        network: on the CPU.
        quantization: one of ``FOUR_BIT_FORMATS``.
        report: called after each layer.
    """

    def __init__(self, network: nn.Module, quantization: str, report: Callable[[], None]) -> None:
        self._report = report
        self._arena = Arena()
        model: Any = network
        self._output_layer = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        self._network = network
        self._paths: dict[nn.Linear, list[str]] = {}
        for path, plain in linear_layers_of(network):
            if takes_four_bits(path, plain, quantization):
                self._paths.setdefault(plain, []).append(path)
            elif plain is self._output_layer:
                self._paths[plain] = []

    def run(self, forward: Forward, prompts: Sequence[Sequence[int]]) -> None:
        for plain in self._paths:
            vars(plain)["forward"] = partial(self._pack, plain)
        try:
            with suppress(_LogitsNotNeeded), wide_products():
                run_prompts(forward, prompts)
        finally:
            for plain in self._paths:
                del plain.forward

    def _pack(self, plain: nn.Linear, inputs: Tensor) -> Tensor:
        """Compute the layer ``plain`` by a packed one, which replaces it. An output layer in bytes ends the step."""
        paths = self._paths.pop(plain)
        del plain.forward  # or the reference to itself would keep its weight in memory
        if not paths:
            raise _LogitsNotNeeded
        packed = pack_in_four_bits(plain, self._arena, error_feedback(inputs.reshape(-1, plain.in_features)))
        for path in paths:
            self._network.set_submodule(path, packed)
        self._report()
        if plain is self._output_layer:
            raise _LogitsNotNeeded
        return packed(inputs)


def run_prompts(forward: Forward, prompts: Sequence[Sequence[int]], logits_of: slice = slice(None)) -> Tensor:
    """Allocate caches for all prompts, compute them in one step, and return its logits ``[N, V]``.

    Args:
        logits_of: tokens of the step whose logits are computed.
    """
    device, num = next(forward.network.parameters()).device, len(prompts)
    lens = [len(prompt) for prompt in prompts]
    blocks_each = -(-max(lens) // _BLOCK_SIZE)
    forward.allocate(num * blocks_each, _BLOCK_SIZE, num, device)
    tables = torch.arange(num * blocks_each, device=device).view(num, blocks_each)
    positions = torch.cat([torch.arange(size, device=device) for size in lens])
    rows = torch.arange(num, device=device).repeat_interleave(torch.tensor(lens, device=device))
    return forward.run(
        ModelInput(
            token_ids=torch.tensor([token_id for prompt in prompts for token_id in prompt], device=device),
            positions=positions,
            logit_rows=torch.arange(len(positions), device=device)[logits_of],
            batch=PagedBatch(tables, rows * blocks_each * _BLOCK_SIZE + positions, lens, lens, _BLOCK_SIZE),
            state_slots=np.arange(num),
        )
    )
