"""From the bytes of images to features in the place of a prompt's tokens."""
