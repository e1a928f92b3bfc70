"""How Redis is reached and followed, what it has to be, and who may do what there."""
