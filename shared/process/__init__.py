"""Needs of every process of Penstock: its command line, log, child processes, locks and secret files."""
