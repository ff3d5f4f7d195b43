"""Which tokens run in which step: plain Python and numpy, no torch."""
