"""The configuration of one engine: created from its options, frozen, sent to the core as JSON.

Users set a field with an ``Option`` by the command line, the environment or a file. The option's help describes the
field.
"""

from __future__ import annotations

import msgspec

from ...shared.errors import ConfigurationError
from ...shared.values.names import is_partition_name
from ...shared.values.shown import MaskedRepr
from ..options.option import OptionGroupMeta, check_fields
from .batch import DEFAULT_TOKEN_BUDGET, BatchOptions
from .checks import check_attention, check_engine, check_quantization, check_speculation
from .computing import ComputingOptions
from .data_parallel import DataParallelOptions, check_data_parallel
from .diagnosis import DiagnosisOptions
from .kv_offload import KVOffloadOptions, check_kv_offload
from .model import AdapterOptions, ModelOptions, check_adapters
from .ranks import PlaceOptions, RankOptions, check_ranks


class EngineConfig(
    MaskedRepr,
    # In the order of the help.
    ModelOptions,
    PlaceOptions,
    BatchOptions,
    ComputingOptions,
    DiagnosisOptions,
    AdapterOptions,
    KVOffloadOptions,
    RankOptions,
    DataParallelOptions,
    msgspec.Struct,
    metaclass=OptionGroupMeta,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
):
    """Configuration of an engine core: model, devices and scheduling. Each group of options is a class."""

    def __post_init__(self) -> None:
        check_fields(self)
        if is_partition_name(self.model_name):
            raise ConfigurationError(
                f"served_model_name must not end in '#' and a number, as partitions do, got {self.model_name!r}"
            )
        check_engine(
            self.engine,
            engine_python=self.engine_python,
            engine_options=self.engine_options,
            engine_url=self.engine_url,
            engine_command=self.engine_command,
        )
        check_quantization(self.quantization, self.device, native_kernels=self.native_kernels)
        check_attention(
            self.attention_backend,
            self.device,
            native_kernels=self.native_kernels,
            deterministic=self.deterministic,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        check_adapters(self, self.engine)
        check_speculation(self.speculative, self.engine, async_scheduling=bool(self.async_scheduling))
        check_kv_offload(self, enable_prefix_caching=self.enable_prefix_caching)
        check_ranks(
            self,
            self.engine,
            async_scheduling=bool(self.async_scheduling),
            kv_offload_dir=self.kv_offload_dir,
            kv_offload_memory=self.kv_offload_memory,
        )
        check_data_parallel(
            self,
            self.engine,
            self.device,
            deterministic=self.deterministic,
            async_scheduling=bool(self.async_scheduling),
            enforce_eager=self.enforce_eager,
            num_ranks=self.num_ranks,
        )
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request needs one token a step"
            )

    @property
    def takes_file_numbers(self) -> bool:
        """Whether the kernels use the numbers of a quantized file as they are, where they can."""
        return self.dtype == "auto" and self.device == "cpu" and self.quantization is None and self.native_kernels

    @property
    def looks_ahead(self) -> bool:
        """Whether the next batch is scheduled while one is computed: ``async_scheduling``, or its default."""
        if self.async_scheduling is not None:
            return self.async_scheduling
        is_alone = self.num_ranks == 1 and not self.is_grouped and self.engine == "penstock"
        return self.device == "cuda" and is_alone and not self.deterministic and not self.max_draft_tokens

    @property
    def token_budget(self) -> int:
        """``max_num_batched_tokens``, or its default for this device and batch size."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(self.max_num_seqs, DEFAULT_TOKEN_BUDGET[self.device])

    def encode(self) -> bytes:
        """Return JSON bytes for ``Configure``."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> EngineConfig:
        """Return the configuration in ``data``, which ``encode`` returned.

        Raises:
            ConfigurationError: a field is missing, unknown or of the wrong type.
        """
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"engine configuration: {error}") from error
