"""Kernels of a mixture of experts between its GEMMs."""
