"""Pieces used inside kernels. Importing any of its modules needs the CuTe DSL."""
