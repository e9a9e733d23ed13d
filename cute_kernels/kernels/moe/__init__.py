"""Kernels of a mixture of experts between its products: configurations in ``config``, kernels
beside.
"""
