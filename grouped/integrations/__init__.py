"""Grouped kernels in other libraries' models; each module imports the library that it is for."""
