"""Options of an engine that stores KV blocks outside its KV cache."""

from __future__ import annotations

from typing import Annotated

from ...shared.errors import ConfigurationError
from ..options.numbers import Size
from ..options.option import Option, OptionGroup
from ..options.readers import Folder

KV_OFFLOADING = "KV offload"
_DEFAULT_DIR_SIZE = 16 << 30


class KVOffloadOptions(OptionGroup):
    """Options for the places of offloaded blocks and their sizes; none by default."""

    kv_offload_memory: Annotated[
        int | None,
        Option(
            "host memory of each engine for KV blocks evicted from its KV cache, so that they are not computed "
            "again; on a CPU use a larger KV cache instead",
            Size(1, 1 << 50),
            default="none",
            group=KV_OFFLOADING,
        ),
    ] = None
    kv_offload_dir: Annotated[
        str,
        Option(
            "folder for KV blocks, shared by the engines of a host and kept over restarts, so that resumed "
            "requests are not computed again",
            Folder(),
            group=KV_OFFLOADING,
        ),
    ] = ""
    kv_offload_dir_size: Annotated[
        int,
        Option(
            "maximum size of that folder for all engines; the least recently used blocks are deleted",
            Size(1, 1 << 60),
            default="16GiB",
            group=KV_OFFLOADING,
        ),
    ] = _DEFAULT_DIR_SIZE

    @property
    def offloads_kv(self) -> bool:
        """Whether blocks are stored outside the KV cache."""
        return self.kv_offload_memory is not None or bool(self.kv_offload_dir)

    @property
    def kv_offload_option(self) -> str:
        """Name of the option that enables offloading, for messages."""
        return "kv_offload_dir" if self.kv_offload_dir else "kv_offload_memory"


def check_kv_offload(options: KVOffloadOptions, *, enable_prefix_caching: bool) -> None:
    """Raise ``ConfigurationError`` if blocks cannot be offloaded."""
    if options.offloads_kv and not enable_prefix_caching:
        raise ConfigurationError(
            f"{options.kv_offload_option} needs prefix caching, whose hashes identify blocks; leave out "
            "--no-enable-prefix-caching"
        )
