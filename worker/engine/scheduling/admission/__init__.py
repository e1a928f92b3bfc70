"""Interfaces of the resources that a request needs before it may run: grammars and adapters. Imports no torch."""
