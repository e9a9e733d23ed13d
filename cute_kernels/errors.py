"""Errors that every layer of the package may raise."""


class UnsupportedError(NotImplementedError):
	"""A combination of op, format and architecture that this version does not run."""
