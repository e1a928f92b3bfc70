"""The lean path: Llama-like decoders as a loop of few fused operations over the loaded weights."""
