"""Models that read images: their encoders, their processors, and how much of what they do with images is served."""
