"""Commands that try the whole system: demo and simulation."""
