"""A core that loads: how long it may stand still, and weights that change while it serves."""
