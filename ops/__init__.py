"""Commands, demo and benchmarks, built on the client."""
