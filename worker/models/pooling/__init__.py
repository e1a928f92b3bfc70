"""Models whose hidden states are pooled: embedders, classifiers, and encoders."""
