"""The arguments that a caller passes with a request, checked and encoded."""
