"""Commands that try the whole system: demo, benchmark, chaos, simulation."""
