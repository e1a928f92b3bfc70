"""Runs real programs and SDKs against a gateway whose engines answer by a script, and writes a table of the results.

    make clients                          all programs; installs them from npm and PyPI into .clients
    make clients CLIENTS='--only codex'   one of them

A program is a module in ``programs``, entered in ``programs.PROGRAMS``. The table is ``ops/lab/reports/clients.md``.
"""
