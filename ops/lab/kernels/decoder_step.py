"""``python -m penstock.ops.lab.kernels.decoder_step``: time a decoder's step without engine, scheduler and sampler.

The weights are random, which does not change the time. The first line on stdout is a JSON object with the
``instructions`` used and the bytes that a step reads: ``weight_bytes``, ``adapter_bytes`` and ``kv_bytes``. Each line
on stdin is a number of seconds to run steps for. It is answered by one line with two lists, which have an entry per
step: ``wall_s``, and ``cpu_s``, the sum over all threads. ``penstock.ops.lab.bench.decoder_step`` runs several of these
programs in turn and compares them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ....kernels import native
from ....kernels.decoder import Decoder, DecoderBatch, DecoderWeights, LayerAdapters, LayerWeights, NormWeights
from ....kernels.huge_pages import Arena
from ....kernels.linear import PackedWeight, pack_weight, quantize_weight, quantize_weight_to_nibbles
from ....kernels.lora.packed import LoraPart, PackedLora, ProductStruct, pack_lora

BLOCK_SIZE = 16
_PACK = {"none": pack_weight, "int8": quantize_weight, "int4": quantize_weight_to_nibbles}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder, from the ``config.json`` of its model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int

    @classmethod
    def from_file(cls, path: Path) -> Sizes:
        config = json.loads(path.read_text())
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            mlp=config["intermediate_size"],
            vocab=config["vocab_size"],
        )


def make_weights(sizes: Sizes, dtype: torch.dtype, quantization: str, arena: Arena | None) -> DecoderWeights:
    """Return random weights, packed as a key of ``_PACK`` says; without ``arena`` each is allocated separately."""
    random = torch.Generator().manual_seed(0)

    def linear(num_outputs: int, num_inputs: int) -> PackedWeight:
        plain = torch.randn(num_outputs, num_inputs, generator=random) * num_inputs**-0.5
        return _PACK[quantization](plain.to(dtype), None, arena)

    def layer() -> LayerWeights:
        return LayerWeights(
            input_norm=norm,
            mlp_norm=norm,
            query_norm=None,
            key_norm=None,
            qkv=linear((sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim, sizes.hidden),
            output=linear(sizes.hidden, sizes.heads * sizes.head_dim),
            gate_up=linear(2 * sizes.mlp, sizes.hidden),
            down=linear(sizes.hidden, sizes.mlp),
            scale=sizes.head_dim**-0.5,
            window=None,
        )

    norm = NormWeights(torch.ones(sizes.hidden, dtype=dtype), 1e-5)
    return DecoderWeights(
        embeddings=torch.randn(sizes.vocab, sizes.hidden, generator=random).to(dtype),
        layers=tuple(layer() for _ in range(sizes.layers)),
        final_norm=norm,
        lm_head=linear(sizes.vocab, sizes.hidden),
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
    )


def make_batch(sizes: Sizes, dtype: torch.dtype, num_requests: int, query_len: int, seq_len: int) -> DecoderBatch:
    """Return a step of ``num_requests`` equal requests: the last ``query_len`` of the ``seq_len`` tokens of each."""
    num_blocks = -(-seq_len // BLOCK_SIZE)
    table = torch.arange(num_requests * num_blocks).reshape(num_requests, -1)
    positions = torch.arange(seq_len - query_len, seq_len)
    slots = table[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    angles = torch.zeros(seq_len, sizes.head_dim)
    num_tokens = num_requests * query_len
    return DecoderBatch(
        token_ids=torch.arange(num_tokens) * 7919 % sizes.vocab,
        positions=positions.repeat(num_requests),
        slot_mapping=slots.flatten().contiguous(),
        block_table=table,
        query_lens=torch.full((num_requests,), query_len),
        seq_lens=torch.full((num_requests,), seq_len),
        logit_rows=torch.arange(1, num_requests + 1) * query_len - 1,
        angles=[(angles.cos(), angles.sin())],
    )


def make_adapters(sizes: Sizes, dtype: torch.dtype, num_adapters: int, rank: int) -> list[PackedLora]:
    """Return random adapters of all layers, in the order of ``LayerAdapters``."""
    query, key_value = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    # Inputs of each product, and outputs of each part of it.
    shapes = ((sizes.hidden, (query, key_value, key_value)), (query, (sizes.hidden,)))
    shapes += ((sizes.hidden, (sizes.mlp, sizes.mlp)), (sizes.mlp, (sizes.hidden,)))

    def adapter(num_inputs: int, outputs: tuple[int, ...]) -> PackedLora:
        starts = itertools.accumulate(outputs, initial=0)
        parts: list[LoraPart] = []
        for start, size in zip(starts, outputs, strict=False):
            a, b = torch.randn(rank, num_inputs), torch.randn(size, rank) * 1e-3
            parts.append(LoraPart(start, a.to(dtype), b.to(dtype)))
        return pack_lora(parts)

    products = [shape for _ in range(sizes.layers) for shape in shapes for _ in range(num_adapters)]
    return [adapter(num_inputs, outputs) for num_inputs, outputs in products]


def make_caches(decoder: Decoder, sizes: Sizes, dtype: torch.dtype, batch: DecoderBatch) -> tuple[list[Tensor], ...]:
    """Return keys and values of each layer, small enough that the softmax stays finite; the parts of a block are
    adjacent, as in an engine.
    """
    num_blocks, *shape = decoder.cache_shape(int(batch.block_table.max()) + 1, BLOCK_SIZE, dtype=dtype)
    # Two such bytes are also a small scale.
    number = 0x3C if dtype == torch.int8 else 0.01
    parts = Arena().zeros((num_blocks, 2 * sizes.layers, *shape), dtype).fill_(number).unbind(1)
    return list(parts[::2]), list(parts[1::2])


def measure(decoder: Decoder, batch: DecoderBatch, seconds: float) -> dict[str, list[float]]:
    """Run steps for ``seconds``, at least one."""
    wall_s: list[float] = []
    cpu_s: list[float] = []
    deadline = time.perf_counter() + seconds
    while not wall_s or time.perf_counter() < deadline:
        cpu, wall = time.process_time(), time.perf_counter()
        decoder.run(batch)
        wall_s.append(time.perf_counter() - wall)
        cpu_s.append(time.process_time() - cpu)
    return {"wall_s": wall_s, "cpu_s": cpu_s}


def main() -> int:
    parser = argparse.ArgumentParser(prog="penstock.ops.lab.kernels.decoder_step", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="config.json of a Llama-like model")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", choices=sorted(_PACK), default="none")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "int8"), default="auto")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--query-len", type=int, default=1, help="tokens of each request in the step")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of each request, including those of the step")
    parser.add_argument("--adapters", type=int, default=0, help="low-rank adapters, divided among the requests")
    parser.add_argument("--rank", type=int, default=16, help="rank of each adapter")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tiles", choices=("on", "off"), default="on")
    parser.add_argument("--huge-pages", choices=("on", "off"), default="on", help="for the weights")
    arguments = parser.parse_args()
    refusal = native.load(uses_tiles=arguments.tiles == "on")
    library = native.loaded()
    if library is None:
        sys.exit(f"the compiled kernels are not available: {refusal}")
    native.set_num_threads(arguments.threads)
    sizes, dtype = Sizes.from_file(arguments.config), getattr(torch, arguments.dtype)
    weights = make_weights(sizes, dtype, arguments.quantization, Arena() if arguments.huge_pages == "on" else None)
    decoder = Decoder(weights)
    batch = make_batch(sizes, dtype, arguments.requests, arguments.query_len, arguments.seq_len)
    cache_dtype = torch.int8 if arguments.kv_cache_dtype == "int8" else dtype
    keys, values = make_caches(decoder, sizes, cache_dtype, batch)
    decoder.use_cache(keys, values, BLOCK_SIZE)
    adapters: list[PackedLora] = []
    if arguments.adapters:
        adapters = make_adapters(sizes, dtype, arguments.adapters, arguments.rank)
        products = (ProductStruct * len(adapters))(*(adapter.struct() for adapter in adapters))
        decoder.use_adapters(LayerAdapters(products, arguments.adapters))
        # As the engine packs a step: tokens of one adapter are adjacent.
        token_lora = torch.arange(len(batch.token_ids)) * arguments.adapters // len(batch.token_ids)
        batch = replace(batch, token_lora=token_lora)
    linears = [weights.lm_head, *(part for layer in weights.layers for part in _linears(layer))]
    step_bytes = {
        "instructions": library.instructions,
        "weight_bytes": sum(linear.packed.nbytes for linear in linears),
        "adapter_bytes": sum(
            lora.a.packed.nbytes + sum(b.packed.nbytes for b, _, _ in lora.parts) for lora in adapters
        ),
        "kv_bytes": sum(cache.nbytes for cache in (*keys, *values)),
    }
    print(json.dumps(step_bytes), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(decoder, batch, float(line))), flush=True)
    return 0


def _linears(layer: LayerWeights) -> tuple[PackedWeight, ...]:
    linears = layer.qkv, layer.output, layer.gate_up, layer.down
    return tuple(linear for linear in linears if linear is not None)


if __name__ == "__main__":
    sys.exit(main())
