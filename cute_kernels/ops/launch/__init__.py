"""How ops run on kernels: the choice of a configuration, and buffers as its arguments."""
