"""What guesses save: three kinds of answers and many requests at once, with and without (decision 0083)."""
