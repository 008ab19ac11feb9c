"""How fast the optimizer is against what one would use instead: `make bench`."""
