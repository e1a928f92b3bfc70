# pyright: reportMissingImports=false
# (xllamacpp is installed in an environment of its own.)
"""llama.cpp's own HTTP server, as the package xllamacpp has it, with the options of ``llama-server``.

There is no wheel of ``llama-server`` itself. Only the options that its tests and our guide use are known.
"""

from __future__ import annotations

import argparse
import signal

import xllamacpp

_CACHE_TYPES = {"f32": xllamacpp.ggml_type.GGML_TYPE_F32, "f16": xllamacpp.ggml_type.GGML_TYPE_F16}
_FLASH_ATTENTION = {
    "auto": xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}


def main() -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(prog="llama-server", description=__doc__)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("-t", "--threads", type=int, default=-1)
    parser.add_argument("-tb", "--threads-batch", type=int, default=-1)
    parser.add_argument("-np", "--parallel", type=int, default=1)
    parser.add_argument("-c", "--ctx-size", type=int, default=0)
    parser.add_argument("--kv-unified", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("-ctk", "--cache-type-k", choices=_CACHE_TYPES, default="f16")
    parser.add_argument("-ctv", "--cache-type-v", choices=_CACHE_TYPES, default="f16")
    parser.add_argument("-fa", "--flash-attn", choices=_FLASH_ATTENTION, default="auto")
    arguments = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = arguments.model
    params.hostnames = [arguments.host]
    params.port = arguments.port
    params.cpuparams.n_threads = arguments.threads
    params.cpuparams_batch.n_threads = arguments.threads_batch
    params.n_parallel = arguments.parallel
    params.n_ctx = arguments.ctx_size
    params.kv_unified = arguments.kv_unified
    params.cache_type_k = _CACHE_TYPES[arguments.cache_type_k]
    params.cache_type_v = _CACHE_TYPES[arguments.cache_type_v]
    params.flash_attn_type = _FLASH_ATTENTION[arguments.flash_attn]
    # The server ends with the last reference to it.
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
