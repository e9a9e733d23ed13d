"""Pipelines between the warps of a CTA, over barriers in shared memory."""

from typing import Any

import cutlass
from cutlass import Int64, cute, pipeline


def stage_barriers(smem: cutlass.memory.SmemAllocator, stages: int) -> cute.Pointer:
    """A full and an empty barrier of each stage."""
    return smem.allocate_array(Int64, 2 * stages, byte_alignment=8)


def make_pipeline(
    kind: Any, barriers: cute.Pointer, stages: int, producers: int, consumers: int, **options: Any
) -> Any:
    """A pipeline of class ``kind`` between so many arrivals; the kernel waits for its barriers
    once, for all.
    """
    producer, consumer = (
        pipeline.CooperativeGroup(pipeline.Agent.Thread, n) for n in (producers, consumers)
    )
    return kind.create(
        barrier_storage=barriers,
        num_stages=stages,
        producer_group=producer,
        consumer_group=consumer,
        defer_sync=True,
        **options,
    )
