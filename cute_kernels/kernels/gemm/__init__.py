"""Grouped GEMM kernels: one for each architecture, and the modules that both share.

To find where a tile is chosen, start at ``choose.choose_config``. ``config`` modules say what is
legal, ``choose`` modules what is preferred, ``cost_model`` modules what is estimated to be fastest.
These, ``variants`` and ``common.problem`` need no CuTe DSL; the other modules do.
"""
