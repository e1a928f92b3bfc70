"""Quantized checkpoints: the declared quantization, and tensors that are unpacked while they are read."""
