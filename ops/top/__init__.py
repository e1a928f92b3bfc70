"""``penstock top``: the operators' figures in a terminal. Reads what the pages of ``ops/views`` read. Extra ``top``."""
