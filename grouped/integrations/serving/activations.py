"""Activations of experts as ``grouped.moe`` takes them."""

from typing import NamedTuple

from cute_kernels.formats.activations import Activation


class ExpertsActivation(NamedTuple):
    """An activation and the order of the rows that it reads.

    Attributes:
        activation: The activation.
        interleaved: True if the rows of gate and up projection alternate.
    """

    activation: Activation
    interleaved: bool = False
