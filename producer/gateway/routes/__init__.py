"""The routes of the gateway: one module per family of endpoints, each with its ``OPERATIONS`` at the end."""
