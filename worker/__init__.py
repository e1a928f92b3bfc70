"""The GPU side: supervisor, worker process and engine core. Importing this package loads no torch."""
