import torch

from cute_kernels.runtime import counters as module

#: What PyTorch calls its default stream, two of its own, and one that it did not make.
DEFAULT, FIRST, SECOND, FOREIGN = 0, 3, 35, 4096


def test_launches_that_may_overlap_share_no_counter(monkeypatch):
    now, waits = {}, []

    def is_capturing(device):
        assert now["stream"], "nothing is captured on the default stream"
        return now["captured"]

    monkeypatch.setattr(module, "_COUNT", 6)
    monkeypatch.setattr(module, "_is_capturing", is_capturing)
    monkeypatch.setattr(module, "_stream_id", lambda device: now["stream"])
    monkeypatch.setattr(module, "_wait", waits.append)
    counters = module.Counters(torch.device("cpu"))
    kept = []

    def current(stream, captured=False):
        now.update(stream=stream, captured=captured)
        kept.append(counters.current())
        assert (kept[-1].dtype, kept[-1].tolist()) == (torch.int32, [0])
        return kept[-1].data_ptr()

    # A graph before all others.
    assert current(FIRST, True) != current(FIRST, True) and counters._all is None
    found = [current(*where) for where in ((DEFAULT,), (FIRST,), (FIRST, True), (FIRST, True))]
    assert (
        len(set(found)) == 4 and [current(DEFAULT), current(FIRST)] == found[:2] and len(waits) == 1
    )
    # All others are gone by now.
    found = [current(*where) for where in ((SECOND,), (FIRST, True), (FOREIGN,), (FOREIGN,))]
    ends = counters._all.data_ptr(), counters._all.data_ptr() + 24
    assert (
        len(set(found)) == 4
        and not any(ends[0] <= at < ends[1] for at in found)
        and len(waits) == 1
    )
