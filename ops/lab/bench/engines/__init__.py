"""The rows about engines, and the sides that run their workload."""
