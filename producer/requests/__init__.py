"""A request's way from the caller's words into the queue, and its outputs' way back."""
