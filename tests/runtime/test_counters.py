"""Counters of dynamically scheduled kernels: launches that may overlap never share one."""

import torch

from cute_kernels.runtime import counters as module

#: Stream ids in PyTorch: the default stream, two from its pool, and an external one.
DEFAULT, POOL_A, POOL_B, EXTERNAL = 0, 3, 35, 4096


def test_launches_that_may_overlap_share_no_counter(monkeypatch):
    """Check that launches that may overlap have different counters."""
    now, waits = {}, []

    def is_capturing(device):
        assert now["stream"], "nothing is captured on the default stream"
        return now["captured"]

    monkeypatch.setattr(module, "_COUNT", 6)
    monkeypatch.setattr(module, "_is_capturing", is_capturing)
    monkeypatch.setattr(module, "_stream_id", lambda device: now["stream"])
    monkeypatch.setattr(module, "_wait", waits.append)
    counters = module.Counters(torch.device("cpu"))
    counters_in_use = []

    def address_for(stream, captured=False):
        """Return the address of the counter for a launch on the stream; keep it in use."""
        now.update(stream=stream, captured=captured)
        counters_in_use.append(counters.current())
        assert (counters_in_use[-1].dtype, counters_in_use[-1].tolist()) == (torch.int32, [0])
        return counters_in_use[-1].data_ptr()

    # A captured launch before any other.
    assert address_for(POOL_A, True) != address_for(POOL_A, True) and counters._all is None
    addresses = [
        address_for(*stream_and_captured)
        for stream_and_captured in ((DEFAULT,), (POOL_A,), (POOL_A, True), (POOL_A, True))
    ]
    assert (
        len(set(addresses)) == 4
        and [address_for(DEFAULT), address_for(POOL_A)] == addresses[:2]
        and len(waits) == 1
    )
    # The six counters of the pool are used up.
    addresses = [
        address_for(*stream_and_captured)
        for stream_and_captured in ((POOL_B,), (POOL_A, True), (EXTERNAL,), (EXTERNAL,))
    ]
    bounds = counters._all.data_ptr(), counters._all.data_ptr() + 24
    assert (
        len(set(addresses)) == 4
        and not any(bounds[0] <= address < bounds[1] for address in addresses)
        and len(waits) == 1
    )
