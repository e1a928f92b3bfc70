"""Tool calls: check definitions, enforce choices, and extract calls from the text."""
