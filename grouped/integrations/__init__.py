"""Grouped kernels in other libraries' models. Each module imports the library that it is for."""
