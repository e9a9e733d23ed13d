"""What every part needs of the host: settings, locks, and which files may be trusted.

It needs nothing but the standard library.
"""
