import importlib.util
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("cutlass") is None:
    names = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    collect_ignore = sorted(names - {"test_gemm_config.py"})

DEVICES = ["cpu"]
if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    DEVICES.append("cuda")


@pytest.fixture(params=DEVICES, ids=["emulated", "gpu"][: len(DEVICES)])
def device(request):
    return request.param
