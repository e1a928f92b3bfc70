"""``penstock quality``: what a number format of weights or KV cache costs in quality, on a text.

Penstock's engine computes the text with a model in a reference format and in other formats, and the predictions are
compared: ``scoring`` has the measures.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ....shared.errors import ConfigurationError, ModelLoadError
from ....shared.process.command_line import Parser, UsageError, format_table, run_reporting_errors
from ....shared.values.distribution import install_command
from ...config.engine_config import EngineConfig
from ...models.checkpoint.folder import resolve_model_folder
from ...models.checks.kl_limits import QUALITY_TEXT
from ...models.formats.declared import has_integers

if TYPE_CHECKING:
    from ...models.checks.divergence import Scores
    from ..composition import Engine
    from .scoring import QualityMeter

T = TypeVar("T")

# With fewer tokens the mean varies by as much as the formats differ.
MIN_TOKENS = 256
DEFAULT_WINDOW, _MAX_WINDOW = 512, 1 << 16
# Enough for a window of 512 tokens of 2 MiB each.
_CACHE_BYTES = 1 << 30
# Formats that are measured if none is requested, as options of an engine on the device.
_FORMATS = {
    "cpu": (
        {"quantization": "int8"},
        {"quantization": "int4-mixed"},
        {"quantization": "int4"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "fp8"},
    ),
    "cuda": (
        {"quantization": "int8"},
        {"quantization": "fp8"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "fp8"},
    ),
}


class FormatQuality(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Result for one number format.

    Args:
        kl: mean divergence from the reference, in nats per token.
        agreement: share of tokens whose most probable next token is the reference's.
        error: why the model cannot be computed in this format; empty if it was.
    """

    weights: str
    kv_cache: str
    perplexity: float | None = None
    kl: float | None = None
    agreement: float | None = None
    error: str = ""


class Quality(msgspec.Struct, kw_only=True):
    """Result of a measurement, and output of ``--json``; the first of ``formats`` is the reference."""

    model: str
    num_tokens: int
    num_windows: int
    formats: list[FormatQuality]


def measure_quality(
    model: str,
    text: str,
    formats: Sequence[dict[str, str]],
    *,
    reference: str = "bfloat16",
    window: int | None = None,
    skips_refused: bool = False,
    report: Callable[[str], object] = str,
    **options: Any,
) -> Quality:
    """Return the quality of ``model`` in the reference format, and in each of ``formats``, on ``text``.

    Args:
        formats: options of ``EngineConfig`` that choose a format.
        reference: dtype of the engine to compare with.
        window: number of tokens that are computed as one prompt; by default 512, or fewer if the model serves fewer.
        skips_refused: whether a format that the model or the host does not support becomes a result with ``error``.
        report: called with a sentence before each format; loading and computing may take minutes.
        options: further options of ``EngineConfig`` for all engines.

    Raises:
        ConfigurationError, ModelLoadError: the model cannot be computed in a format.
        UsageError: the text has too few tokens.
    """
    options |= {"model": model, "max_num_batched_tokens": window or DEFAULT_WINDOW}
    if window is not None:
        options["max_model_len"] = window + 1
    reference_config = _config_with(**options, dtype=reference)
    configs = [_config_with(**{**options, "dtype": "bfloat16", **chosen}) for chosen in formats]
    report(f"computing {reference} …")
    meter, result = _with_engine(reference_config, partial(_measure_reference, text, window or DEFAULT_WINDOW))
    results = [result]
    for config in configs:
        report(f"computing {', '.join(_format_names(config))} …")
        try:
            results.append(_with_engine(config, lambda engine: _format_result(engine, meter.compare(engine))))
        except (ConfigurationError, ModelLoadError) as error:
            if not skips_refused:
                raise
            weights, kv_cache = _format_names(config)
            results.append(FormatQuality(weights=weights, kv_cache=kv_cache, error=str(error)))
    return Quality(model=model, num_tokens=meter.num_tokens, num_windows=meter.num_windows, formats=results)


def _format_names(config: EngineConfig) -> tuple[str, str]:
    """Return the formats of weights and KV cache."""
    return config.quantization or config.dtype, config.eight_bit_cache or config.dtype


def _config_with(**options: Any) -> EngineConfig:
    return EngineConfig(max_num_seqs=1, kv_cache_memory=_CACHE_BYTES, enable_prefix_caching=False, **options)


def _with_engine(config: EngineConfig, measure: Callable[[Engine], T]) -> T:
    """Return the result of ``measure`` for an engine that is built for it."""
    # Not at the top, because --help and a mistyped folder need no torch.
    from ..composition import build_engine

    # Frees the engine before this one, since parts of a model refer to each other in circles.
    gc.collect()
    try:
        engine = build_engine(config, resolve_model_folder(config.model))
    except ConfigurationError as error:
        remedy = "; --window N sets it to N + 1" if "max_model_len" in str(error) else ""
        raise ConfigurationError(f"{error}{remedy}") from error
    try:
        return measure(engine)
    finally:
        engine.close()


def _measure_reference(text: str, window: int, engine: Engine) -> tuple[QualityMeter, FormatQuality]:
    """Return a meter with the predictions of ``engine``, and its result; raises as ``measure_quality``."""
    from ...text.tokenizer import TextCodec
    from .scoring import QualityMeter, cut_windows

    ready = engine.ready
    if ready.pooling is not None:
        raise ConfigurationError(f"model {ready.model_folder} generates no text, so it has no perplexity to measure")
    # A window needs a position for the token after it.
    windows = cut_windows(TextCodec.load(Path(ready.model_folder)), text, min(window, ready.max_model_len - 1))
    if (num_tokens := sum(map(len, windows))) < MIN_TOKENS:
        raise UsageError(
            f"the text has {num_tokens} tokens, too few to judge by; give --text one of {MIN_TOKENS} tokens or more"
        )
    meter = QualityMeter(windows)
    return meter, _format_result(engine, meter.measure_reference(engine))


def _format_result(engine: Engine, scores: Scores) -> FormatQuality:
    ready = engine.ready
    return FormatQuality(
        weights=ready.quantization or ready.dtype,
        kv_cache=ready.kv_cache_dtype,
        perplexity=scores.perplexity,
        kl=scores.kl,
        agreement=scores.agreement,
    )


def quality_table(quality: Quality) -> str:
    """Return ``quality`` as a table for people, with a line for each format that the model refused."""
    reference = quality.formats[0]
    rows, notes = [], []
    for result in quality.formats:
        if result.perplexity is None:
            rows.append((result.weights, result.kv_cache, "-", "-", "-"))
            notes.append(f"{result.weights}, KV cache {result.kv_cache}: {result.error}")
        elif result is reference:
            rows.append((result.weights, result.kv_cache, f"{result.perplexity:.3f}", "reference", "reference"))
        else:
            kl, agreement = result.kl or 0.0, result.agreement or 0.0
            rows.append((result.weights, result.kv_cache, f"{result.perplexity:.3f}", f"{kl:.4f}", f"{agreement:.1%}"))
    table = format_table(("WEIGHTS", "KV CACHE", "PERPLEXITY", "KL (NATS)", "SAME FIRST CHOICE"), rows)
    return "\n".join((f"{quality.model}, {quality.num_tokens} tokens", "", table, *notes))


def _formats_of(arguments: argparse.Namespace) -> tuple[dict[str, str], ...]:
    """Return the formats to measure after the reference, as options of an engine."""
    chosen = {name: value for name in ("quantization", "kv_cache_dtype") if (value := getattr(arguments, name))}
    if chosen:
        return (chosen,)
    file_numbers = ({"dtype": "auto"},) if arguments.device == "cpu" and has_integers(Path(arguments.model)) else ()
    others = (*file_numbers, *_FORMATS.get(arguments.device, ()))
    return others if arguments.reference == "bfloat16" else ({}, *others)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the text {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the text {path} is not UTF-8: {error}; convert it") from error


def _add_quality_arguments(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model folder, .gguf file, or name on the hub")
    parser.add_argument(
        "--quantization",
        metavar="FORMAT",
        help="weights to measure: int8, int4-mixed, int4 (CPU) or fp8 (GPU); default: all",
    )
    parser.add_argument(
        "--kv-cache-dtype", metavar="FORMAT", help="KV cache to measure: int8, fp8, fp8_e4m3 or fp8_e5m2"
    )
    parser.add_argument(
        "--reference",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="format to compare with (bfloat16); float32 measures bfloat16, too",
    )
    parser.add_argument("--text", type=Path, default=QUALITY_TEXT, metavar="FILE", help="UTF-8 text (one of ours)")
    parser.add_argument(
        "--window", type=int, metavar="N", help=f"tokens of a prompt ({DEFAULT_WINDOW}, or as many as the model serves)"
    )
    parser.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu or cuda (cpu)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="threads on the CPU; 0 chooses (0)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _report_progress(sentence: str) -> None:
    """Write to the terminal; a log or a pipe gets only the result."""
    if sys.stderr.isatty():
        sys.stderr.write(f"{sentence}\n")


def _print_quality(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("torch") is None:
        raise UsageError(f"penstock quality computes the model, which needs torch; {install_command('worker')}")
    if arguments.window is not None and not 2 <= arguments.window <= _MAX_WINDOW:
        raise UsageError(f"--window must be between 2 and {_MAX_WINDOW}, got {arguments.window}")
    text, formats = _read_text(arguments.text), _formats_of(arguments)
    quality = measure_quality(
        arguments.model,
        text,
        formats,
        reference=arguments.reference,
        window=arguments.window,
        skips_refused=len(formats) > 1,
        report=_report_progress,
        device=arguments.device,
        num_threads=arguments.threads,
        trust_remote_code=arguments.trust_remote_code,
    )
    output = msgspec.json.encode(quality).decode() if arguments.json else quality_table(quality)
    sys.stdout.write(f"{output}\n")
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print the table or the JSON, and return the exit status: 0, or 1 or 2 after an error message.

    Args:
        words: arguments of the command line; None for those of this process.
    """
    parser = Parser(prog="penstock quality", description=__doc__)
    _add_quality_arguments(parser)
    arguments = parser.parse_args(words)
    return run_reporting_errors(lambda: _print_quality(arguments))


if __name__ == "__main__":
    sys.exit(main())
