"""Processes of a deployment on this machine, which end with the process that started them."""
