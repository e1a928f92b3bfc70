"""The rows about engines, and who runs their workload."""
