"""Tile schedulers, loaders, operands and epilogues that both architectures share."""
