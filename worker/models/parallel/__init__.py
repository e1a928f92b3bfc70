"""One model over several ranks: which rank holds what, what it sends to the others, and how its part is cut."""
