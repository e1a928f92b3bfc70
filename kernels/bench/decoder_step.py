"""``python -m penstock.kernels.bench.decoder_step``: a decoder's step alone, measured when a line on stdin says so.

Without engine, scheduler and sampler; the weights are random, which changes no time. The first line on stdout is a JSON
object with ``instructions``, ``weight_bytes`` and ``kv_bytes``, what a step reads. Then for each line on stdin, a
number of seconds, one with the steps' ``wall_s`` and ``cpu_s``, all threads' together, a step each. ``penstock.ops.
bench.decoder_step`` runs several of these in turn and compares them.
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

from .. import native
from ..decoder import Decoder, DecoderBatch, DecoderWeights, LayerAdapters, LayerWeights, NormWeights
from ..huge_pages import Arena
from ..linear import PackedWeight, pack_weight, quantize_weight, quantize_weight_to_nibbles
from ..lora.packed import LoraPart, PackedLora, ProductStruct, pack_lora

BLOCK_SIZE = 16
_PACK = {"none": pack_weight, "int8": quantize_weight, "int4": quantize_weight_to_nibbles}


@dataclass(frozen=True)
class Sizes:
    """Of a decoder, from the ``config.json`` of its model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int

    @classmethod
    def read(cls, path: Path) -> Sizes:
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
    """Random weights, of a key of ``_PACK``; without ``arena`` each in memory of its own."""
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
    """A step of ``num_requests`` requests alike: their last ``query_len`` of ``seq_len`` tokens."""
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
    """Random adapters of all layers, in the order of ``LayerAdapters``."""
    query, key_value = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    # Inputs of each product, and outputs of each of its parts.
    shapes = ((sizes.hidden, (query, key_value, key_value)), (query, (sizes.hidden,)))
    shapes += ((sizes.hidden, (sizes.mlp, sizes.mlp)), (sizes.mlp, (sizes.hidden,)))
    held: list[PackedLora] = []
    for _ in range(sizes.layers):
        for num_inputs, outputs in shapes:
            for _ in range(num_adapters):
                starts = itertools.accumulate(outputs, initial=0)
                held.append(
                    pack_lora(
                        [
                            LoraPart(
                                start,
                                torch.randn(rank, num_inputs).to(dtype),
                                (torch.randn(size, rank) * 1e-3).to(dtype),
                            )
                            for start, size in zip(starts, outputs, strict=False)
                        ]
                    )
                )
    return held


def make_caches(decoder: Decoder, sizes: Sizes, dtype: torch.dtype, batch: DecoderBatch) -> tuple[list[Tensor], ...]:
    """Keys and values of each layer, small enough to leave softmax numbers."""
    shape = decoder.cache_shape(int(batch.block_table.max()) + 1, BLOCK_SIZE)
    return tuple([torch.full(shape, 0.01, dtype=dtype) for _ in range(sizes.layers)] for _ in range(2))


def measure(decoder: Decoder, batch: DecoderBatch, seconds: float) -> dict[str, list[float]]:
    """Run steps for so long, one at least."""
    wall_s: list[float] = []
    cpu_s: list[float] = []
    until = time.perf_counter() + seconds
    while not wall_s or time.perf_counter() < until:
        cpu, wall = time.process_time(), time.perf_counter()
        decoder.run(batch)
        wall_s.append(time.perf_counter() - wall)
        cpu_s.append(time.process_time() - cpu)
    return {"wall_s": wall_s, "cpu_s": cpu_s}


def main() -> int:
    parser = argparse.ArgumentParser(prog="penstock.kernels.bench.decoder_step", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="config.json of a Llama-like model")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", choices=sorted(_PACK), default="none")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--query-len", type=int, default=1, help="tokens of each request in the step")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of each request with those of the step")
    parser.add_argument("--adapters", type=int, default=0, help="low-rank adapters that the requests share among them")
    parser.add_argument("--rank", type=int, default=16, help="of each adapter")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tiles", choices=("on", "off"), default="on")
    parser.add_argument("--huge-pages", choices=("on", "off"), default="on", help="of the weights")
    arguments = parser.parse_args()
    refusal = native.load(uses_tiles=arguments.tiles == "on")
    library = native.loaded()
    if library is None:
        sys.exit(f"the compiled kernels cannot be had: {refusal}")
    native.set_num_threads(arguments.threads)
    sizes, dtype = Sizes.read(arguments.config), getattr(torch, arguments.dtype)
    weights = make_weights(sizes, dtype, arguments.quantization, Arena() if arguments.huge_pages == "on" else None)
    decoder = Decoder(weights)
    batch = make_batch(sizes, dtype, arguments.requests, arguments.query_len, arguments.seq_len)
    keys, values = make_caches(decoder, sizes, dtype, batch)
    decoder.use_cache(keys, values, BLOCK_SIZE)
    held: list[PackedLora] = []
    if arguments.adapters:
        held = make_adapters(sizes, dtype, arguments.adapters, arguments.rank)
        products = (ProductStruct * len(held))(*(one.struct() for one in held))
        decoder.use_adapters(LayerAdapters(products, arguments.adapters))
        # As the engine packs a step: those of one adapter lie together.
        of_token = torch.arange(len(batch.token_ids)) * arguments.adapters // len(batch.token_ids)
        batch = replace(batch, token_lora=of_token)
    linears = [weights.lm_head, *(part for layer in weights.layers for part in _linears_of(layer))]
    read = {
        "instructions": library.instructions,
        "weight_bytes": sum(linear.packed.nbytes for linear in linears),
        "adapter_bytes": sum(one.a.packed.nbytes + sum(b.packed.nbytes for b, _, _ in one.parts) for one in held),
        "kv_bytes": sum(cache.nbytes for cache in (*keys, *values)),
    }
    print(json.dumps(read), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(decoder, batch, float(line))), flush=True)
    return 0


def _linears_of(layer: LayerWeights) -> tuple[PackedWeight, ...]:
    linears = layer.qkv, layer.output, layer.gate_up, layer.down
    return tuple(linear for linear in linears if linear is not None)


if __name__ == "__main__":
    sys.exit(main())
