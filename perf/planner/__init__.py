"""A model of time and memory of a layer of experts, fitted to records: see ``perf.explain``."""
