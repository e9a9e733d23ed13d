"""English text that every Python installation carries, as bytes to train on."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

__all__ = ["Batch", "Corpus", "load_corpus", "sample_batch", "unigram_entropy"]

#: Inputs and targets, both (batch, context) int64; the targets are the inputs' next bytes.
Batch = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Byte sequences: uint8 vectors that do not overlap."""

    train: Tensor
    held_out: Tensor

    def check_context(self, context: int) -> None:
        """Raise ValueError if there is no sequence of ``context`` bytes and a next one."""
        shorter = min(len(self.train), len(self.held_out))
        if context >= shorter:
            raise ValueError(
                f"context must be less than the {shorter} bytes of text, got {context}"
            )


def load_corpus(held_out: float = 0.1) -> Corpus:
    """The help texts of Python's language reference (``pydoc_data.topics``), in name order.

    Args:
        held_out: the share at the end of the text that is not trained on.

    Raises:
        RuntimeError: this Python was installed without the texts.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError(
            "this Python has no pydoc_data.topics, the text that the demo trains on; "
            "install the complete standard library"
        ) from error
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = round(len(data) * (1 - held_out))
    return Corpus(data[:cut], data[cut:])


def unigram_entropy(data: Tensor) -> float:
    """Entropy in nats of the byte frequencies: the loss of the best model without context."""
    counts = torch.bincount(data.long())
    frequency = counts[counts > 0].double() / len(data)
    return float(-(frequency * frequency.log()).sum())


def sample_batch(data: Tensor, batch: int, context: int, generator: torch.Generator) -> Batch:
    """``batch`` random windows of ``data``, which must be longer than ``context``."""
    first = torch.randint(len(data) - context, (batch, 1), generator=generator)
    windows = data[first + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
