"""The processes of an engine of several ranks: rank 0 is the engine core, the others compute what it tells them."""
