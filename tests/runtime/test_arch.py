"""Architectures: which kernels and which target a device or a name selects."""

import pytest
import torch

from cute_kernels.capability import ARCHITECTURES, UnsupportedError
from cute_kernels.runtime import Architecture, architecture, device_architecture
from cute_kernels.runtime.arch import TARGETS, _index_architecture


@pytest.fixture
def gpu(monkeypatch):
    """Pretend to have six GPUs; yield the list of capability queries."""
    queries = []
    capabilities = {0: (9, 0), 1: (10, 0), 2: (10, 3), 3: (8, 0), 4: (12, 0), 5: (11, 0)}

    def query(index):
        queries.append(index)
        return capabilities[index]

    monkeypatch.setattr(torch.cuda, "get_device_capability", query)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    _index_architecture.cache_clear()
    yield queries
    _index_architecture.cache_clear()


def test_kernels_and_target_follow_the_device(gpu):
    """Check that kernels and compiler target follow the device."""
    assert device_architecture(torch.device("cuda", 0)) == Architecture("sm_90a", "sm_90a")
    assert device_architecture(1) == Architecture("sm_100a", "sm_100a")
    assert device_architecture(2) == Architecture("sm_100a", "sm_103a")
    assert device_architecture(torch.device("cuda")) == device_architecture(1)


def test_the_capability_of_a_device_is_queried_once(gpu):
    for _ in range(3):
        device_architecture(torch.device("cuda", 0))
    assert gpu == [0]


@pytest.mark.parametrize(
    ("index", "reason"), [(3, "no TMA"), (4, "tcgen05"), (5, "no kernel has been made")]
)
def test_other_devices_raise_with_the_reason(gpu, index, reason):
    with pytest.raises(UnsupportedError, match=f"GPU {index}.*{reason}.*sm_90a, sm_100a, sm_103a"):
        device_architecture(index)


def test_cpu_tensors_have_no_architecture():
    with pytest.raises(UnsupportedError, match="got one on cpu"):
        device_architecture(torch.device("cpu"))


def test_names_select_kernels_and_target():
    """Check that names select kernels and compiler target."""
    assert architecture("sm_103a") == Architecture("sm_100a", "sm_103a")
    assert architecture("emulated:sm_90a") == Architecture("sm_90a", "sm_90a", emulated=True)
    for text in ("sm_90a", "sm_103a", "emulated:sm_100a"):
        assert str(architecture(text)) == text
    assert set(TARGETS.values()) == set(ARCHITECTURES) - {"reference"}


@pytest.mark.parametrize("text", ["sm_80", "emulated:sm_103a", "emulated:", "", "reference"])
def test_unknown_names_raise(text):
    with pytest.raises(ValueError, match="arch must be one of sm_90a, .*emulated:sm_100a, got"):
        architecture(text)
