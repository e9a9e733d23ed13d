"""Numbers that are the same on every GPU; importing them needs no CuTe DSL."""

#: Threads of a warp.
WARP_SIZE = 32
