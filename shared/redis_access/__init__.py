"""Connections to Redis, the requirements on a server, the rights of its users, and Lua scripts."""
