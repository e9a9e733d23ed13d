"""Measurements: counts on the emulator, times on a GPU."""
