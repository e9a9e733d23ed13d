"""Pipelines between the warps of a CTA, over barriers in shared memory."""

from typing import Any

import cutlass
from cutlass import Int64, cute, pipeline


def stage_barriers(smem: cutlass.memory.SmemAllocator, stages: int) -> cute.Pointer:
    """Allocate a full and an empty barrier for each stage."""
    return smem.allocate_array(Int64, 2 * stages, byte_alignment=8)


def make_pipeline(
    kind: Any, barriers: cute.Pointer, stages: int, producers: int, consumers: int, **options: Any
) -> Any:
    """Create a pipeline of class ``kind`` over barriers in shared memory.

    The kernel waits once for the barriers of all pipelines, after the last one is created.

    Args:
        kind: Class of the pipeline.
        barriers: Full and empty barriers of the stages.
        stages: Number of stages.
        producers: Arrivals that fill a stage.
        consumers: Arrivals that free a stage.
        **options: Options of the class.
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
