"""What runs an op on compiled kernels: the choice of kernels, and tensors as their arguments."""
