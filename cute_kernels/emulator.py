"""Alias of the package ``ptx_emulator``: both names are the same module."""

import sys

import ptx_emulator

sys.modules[__name__] = ptx_emulator
