"""Which sizes of steps are captured."""

from __future__ import annotations

from torch import nn

_MAX_ROWS = 512
_MAX_TOKENS = 2048
_TOKEN_SIZES = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, _MAX_TOKENS)
# Of steps with prompts. Few rows of long contexts have their keys split among more programs than many.
_FEW_ROWS = 16
# Multiplications and additions of a layer's products that take a device as long as the host takes to launch the layer:
# 0.7 ms of a Python host at 600 TFLOP/s of a Hopper GPU (ops/lab/reports/gpu.md).
_LAYER_FLOP = 4e11


def capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of rows to capture decodes of, ascending: 1, 2, 4, every 8th to 256, every 32nd to 512, and the largest.

    A decode waits for the weights, which up to some hundred rows are read once for all: 7 rows of padding cost next to
    nothing, and neither do 31 of 300. So many sizes cost a start seconds and some memory; beyond 512 the kernels are
    long enough to hide their launches. (vLLM captures 1, 2, 4, then every 8th to 256 and every 16th to 512.)
    """
    limit = min(max_num_seqs, _MAX_ROWS)
    steps = (1, 2, 4, *range(8, 256, 8), *range(256, _MAX_ROWS, 32))
    return (*(size for size in steps if size < limit), limit)


def token_sizes(token_budget: int, network: nn.Module) -> tuple[int, ...]:
    """Numbers of tokens to capture steps with prompts of, ascending; from the second on a third is padding at most.

    As far as the device waits for the host. Where it has more to do, padding costs more than launches.
    """
    layers: list[nn.Module] = list(network.get_submodule("layers").children())
    tensors = (tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers()))
    layer_weights = sum(tensor.numel() for tensor in tensors) / len(layers)
    limit = min(token_budget, _MAX_TOKENS, int(_LAYER_FLOP / (2 * layer_weights)))
    sizes = tuple(size for size in _TOKEN_SIZES if size <= limit)
    # A long prompt's steps are as large as the budget.
    is_last = limit < token_budget or token_budget in sizes or token_budget < 2
    return sizes if is_last else (*sizes, token_budget)


def row_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of rows to capture steps with prompts for, ascending."""
    limit = min(max_num_seqs, _MAX_ROWS)
    return (_FEW_ROWS, limit) if limit > _FEW_ROWS else (limit,)
