"""The engine core from the worker process's side: start it, exchange messages, watch it, and classify its exit."""
