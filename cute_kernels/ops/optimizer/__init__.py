"""The op that updates fp32 master weights and quantizes them, and its launcher."""
