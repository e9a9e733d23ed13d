"""The op that quantizes groups, and its launcher."""
