"""Draft tokens: guess the next tokens of requests, so that a step can compute several of them."""
