"""Options of an engine that change speed, memory or rounding."""

from __future__ import annotations

from typing import Annotated

from ..options.numbers import Integer
from ..options.option import Option, OptionGroup
from ..options.readers import Choice, ChoiceWithCount, Switch

COMPUTING = "computation"
# Largest number of draft tokens of a request in a step, and the number without one after `ngram`: with the last token
# it fills a tile of 16 rows.
MAX_DRAFT_TOKENS, DEFAULT_DRAFT_TOKENS = 64, 15
# Formats in which most weights take four bits. Their layers are packed by examples of their inputs.
FOUR_BIT_FORMATS = ("int4-mixed", "int4")


class ComputingOptions(OptionGroup):
    """Options for kernels, number formats, and work in advance."""

    seed: Annotated[
        int, Option("seed of random numbers that belong to no request", Integer(0, (1 << 63) - 1), group=COMPUTING)
    ] = 0
    deterministic: Annotated[
        bool,
        Option(
            "a request gets the same tokens in any batch and on any equal engine that resumes it; slower",
            Switch(),
            group=COMPUTING,
        ),
    ] = False
    native_kernels: Annotated[
        bool,
        Option(
            "on the CPU, compile kernels for this processor at the first start if a compiler is installed",
            Switch(),
            group=COMPUTING,
        ),
    ] = True
    quantization: Annotated[
        str | None,
        Option(
            "store the weights of linear layers in eight or four bits: faster, but logits differ by some percent "
            "(four bits: by more); int4-mixed: the output layer and the projections out of attention and "
            "feed-forward parts in eight bits, the others in four; int4 and int4-mixed on the CPU, fp8 on a GPU",
            Choice("int8", *FOUR_BIT_FORMATS, "fp8"),
            group=COMPUTING,
        ),
    ] = None
    async_scheduling: Annotated[
        bool | None,
        Option(
            "schedule the next batch while one is computed: the same tokens, faster for large batches of small models",
            Switch(),
            default="yes on a single GPU without --deterministic and --speculative",
            group=COMPUTING,
        ),
    ] = None
    speculative: Annotated[
        str,
        Option(
            "draft several tokens of a request and verify them in one step with free rows: the same tokens, sooner; "
            f"ngram: up to N (default {DEFAULT_DRAFT_TOKENS}) tokens that followed its last tokens before, were "
            "predicted, or are forced by a grammar; suffix: also from outputs of other requests with its tenant and "
            "salt",
            ChoiceWithCount("off", "ngram", "suffix", counted=("ngram", "suffix"), most=MAX_DRAFT_TOKENS),
            group=COMPUTING,
        ),
    ] = "off"
    # Capturing graphs takes seconds at the start, and memory.
    enforce_eager: Annotated[
        bool,
        Option(
            "on a GPU, capture no CUDA graphs: faster start and less memory, slower steps",
            Switch(),
            group=COMPUTING,
        ),
    ] = False
    attention_backend: Annotated[
        str,
        Option(
            "implementation of attention: triton on a GPU, native (compiled) on the CPU, reference (torch) "
            "anywhere; auto: the one for the device, and the reference for unsupported cases",
            Choice("auto", "triton", "native", "reference"),
            group=COMPUTING,
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        str,
        Option(
            "store keys and values in eight bits: int8 holds 1.88 times the tokens in the same memory and predicts "
            "nearly the same; fp8 (fp8_e4m3) holds twice the tokens, predicts less alike, and is several times slower "
            "on the CPU; auto: dtype of the model",
            Choice("auto", "int8", "fp8", "fp8_e4m3", "fp8_e5m2"),
            group=COMPUTING,
        ),
    ] = "auto"

    @property
    def has_four_bit_weights(self) -> bool:
        """Whether linear layers are packed in four bits, by examples of their inputs."""
        return self.quantization in FOUR_BIT_FORMATS

    @property
    def eight_bit_cache(self) -> str | None:
        """Full name of the eight-bit format of keys and values; None for that of the model."""
        if self.kv_cache_dtype == "auto":
            return None
        return "fp8_e4m3" if self.kv_cache_dtype == "fp8" else self.kv_cache_dtype

    @property
    def max_draft_tokens(self) -> int:
        """Largest number of draft tokens of a request in a step; 0 without speculative decoding."""
        word, _, count = self.speculative.partition(":")
        return 0 if word == "off" else int(count or DEFAULT_DRAFT_TOKENS)
