"""From logits to tokens: the parameters of the running requests as arrays, and what they change."""
