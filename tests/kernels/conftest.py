"""Devices of the kernel tests. Nothing in this folder is collected without the CuTe DSL."""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("cutlass") is None:
    collect_ignore_glob = ["test_*.py"]

DEVICES = ["cpu"]
if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    DEVICES.append("cuda")


@pytest.fixture(params=DEVICES, ids=["emulated", "gpu"][: len(DEVICES)])
def device(request):
    """Device to run on: the CPU (emulated), and a Hopper GPU if there is one."""
    return request.param
