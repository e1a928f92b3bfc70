"""The control calls of an engine core: sleep, reload, profiles, and methods by name."""
