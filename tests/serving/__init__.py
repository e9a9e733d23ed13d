"""Serve small models in a real engine on a CPU: run by ``.ci/vllm``."""
