"""Ops that reduce over groups: end offsets, amaxes and column sums."""
