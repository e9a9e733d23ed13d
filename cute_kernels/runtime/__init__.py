"""Choice of backend, compilation and launch."""
