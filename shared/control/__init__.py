"""Calls to an engine and their answers: a file for each subject, their unions in ``calls``."""
