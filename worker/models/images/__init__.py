"""Models that read images: vision encoders, image processors, and checks of both."""
