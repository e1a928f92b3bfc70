"""Loading of an engine core: detection of a hang, and replacement of weights while it serves."""
