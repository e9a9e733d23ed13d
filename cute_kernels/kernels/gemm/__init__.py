"""Grouped GEMM kernels: one for each architecture, and above them what both share.

``problem``, ``operands``, ``choice``, ``variants`` and the configurations ``sm100.config`` and
``sm90.config`` need no CuTe DSL; the other modules do.
"""
