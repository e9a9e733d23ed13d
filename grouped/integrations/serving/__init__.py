"""Parts that plug-ins for serving engines share: schemes, weights and warm-up.

Importing this package imports no engine.
"""
