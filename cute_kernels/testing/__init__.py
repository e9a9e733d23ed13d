"""Tools for tests and measurements of kernels: compilation for the emulator, cubin contents."""
