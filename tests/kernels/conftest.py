import pytest
import torch

DEVICES = ["cpu"]
if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
	DEVICES.append("cuda")


@pytest.fixture(params=DEVICES, ids=["emulated", "gpu"][: len(DEVICES)])
def device(request):
	return request.param
