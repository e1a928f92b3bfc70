"""An engine whose prompts are pooled: embeddings, classes, scores."""
