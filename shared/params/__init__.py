"""What a caller may ask of a request, checked as early as possible."""
