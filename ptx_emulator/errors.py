"""Exceptions of the emulator."""


class EmulatorError(RuntimeError):
    """A kernel did what hardware would fault on, hang on or get wrong, or is not modelled.

    The message names the kernel, the CTA, the warp and the PTX instruction.
    """


class BuildError(RuntimeError):
    """The engine could not be compiled. The message says what to install."""
