"""Parameters of a request, checked as early as possible."""
