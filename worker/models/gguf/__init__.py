"""GGUF, llama.cpp's format: one file with configuration, tokenizer and weights."""
