"""The tile quantizer: a loader, and converters of rows and of columns of 128x128 tiles."""
