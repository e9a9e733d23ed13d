"""Numbers that are the same on every GPU; importing them needs no CuTe DSL."""

#: Bytes of one element, by the dtype names that configurations use.
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

#: Threads of a warp.
WARP_SIZE = 32
