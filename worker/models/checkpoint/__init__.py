"""What is in a model's folder: read as a whole, or refused in words."""
