"""The routes of the gateway: a module for each family of endpoints, which ends in its ``OPERATIONS``."""
