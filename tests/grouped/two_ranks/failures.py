"""A rank that fails. This subject comes last: one rank is gone after it."""

import datetime
import time

import pytest
import torch
import torch.distributed as dist

from grouped.functional.experts import compute_routing
from grouped.parallel import Exchange

from .runner import check, leave, world


@check
def a_missing_rank_raises():
    """A rank that comes too late, or dies, raises an error no later than the group's timeout."""
    late = dist.new_group(timeout=datetime.timedelta(seconds=1))
    for group in (late, world.mesh.get_group()):
        dist.barrier()
        if world.rank:
            if group is not late:
                leave()
            dist.barrier()
            continue
        exchange = Exchange(group, 4)
        start = time.perf_counter()
        routing = compute_routing(torch.tensor([[0, 2]]), 4)
        with pytest.raises(RuntimeError, match="one of them is gone, or did not come before"):
            exchange.plan(routing, torch.ones(1, 2))
        assert time.perf_counter() - start < 20
        if group is late:
            dist.barrier()
