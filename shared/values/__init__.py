"""Checks of single values that callers pass (names, URLs, timeouts), and how messages and formats show them."""
