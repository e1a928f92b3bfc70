"""Models that read images: their towers, their processors, and how much of what they do with images is served."""
