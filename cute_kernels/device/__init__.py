"""Building blocks of kernels. All modules but ``constants`` import the CuTe DSL."""
