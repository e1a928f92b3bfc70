"""Text: tokenizer, chat template, incremental detokenization, stop strings. No torch, no transformers."""
