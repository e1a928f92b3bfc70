"""What a caller passes with a request, checked and encoded."""
