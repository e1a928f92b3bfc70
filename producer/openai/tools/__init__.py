"""Tool calls: definitions checked, choices enforced, calls taken out of the text."""
