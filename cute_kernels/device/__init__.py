"""Pieces used inside kernels. All but ``constants`` need the CuTe DSL to be imported."""
