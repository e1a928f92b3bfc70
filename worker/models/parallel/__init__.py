"""One model over several ranks: the layout, the communication of ranks, and the cut of weights."""
