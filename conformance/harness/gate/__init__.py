"""Two builds against each other: the suite on both, states from one to the other, speed in turn, and one answer."""
