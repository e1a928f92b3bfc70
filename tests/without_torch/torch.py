"""In the place of torch while `make test-fast` runs, for its own process and for every process that it starts."""

raise ImportError("this runs without torch: what needs it is left out by tests/fast.py")
