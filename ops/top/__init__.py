"""``penstock top``: the operators' pages of ``ops/views`` in a terminal. Extra ``top``."""
