"""The processes of an engine of several ranks: rank 0 is the engine core, and the others run its commands."""
