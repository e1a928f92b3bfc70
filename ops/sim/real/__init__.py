"""Comparison of the simulator with reality: scenarios in real time and on real engines, and fits to recorded steps."""
