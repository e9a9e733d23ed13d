"""Host services that all packages share: settings, locks and file permissions.

It needs only the standard library.
"""
