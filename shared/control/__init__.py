"""What may be asked of an engine, and what it answers: a file for each subject, their unions in ``calls``."""
