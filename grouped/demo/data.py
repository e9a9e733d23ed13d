"""English text that every Python installation carries, as bytes to train on."""

import dataclasses

import torch
from torch import Tensor

#: Inputs and targets, both (batch, context) int64; the targets are the inputs' next bytes.
Batch = tuple[Tensor, Tensor]
_BLOCK, _EVERY = 4096, 10


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Texts to train on and to measure with: uint8 vectors that have no part in common."""

    train: Tensor
    held_out: Tensor

    def check_context(self, context: int) -> None:
        """Raise ValueError if there is no sequence of ``context`` bytes and a next one."""
        shorter = min(len(self.train), len(self.held_out))
        if context >= shorter:
            raise ValueError(
                f"context must be less than the {shorter} bytes of text, got {context}"
            )


def load_corpus() -> Corpus:
    """The help texts of Python's language reference (``pydoc_data.topics``), in name order.

    Every tenth block of 4 KiB is held out.

    Raises:
        RuntimeError: this Python was installed without the texts.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError(
            "this Python has no pydoc_data.topics, the text that the demo trains on; install the complete standard library"
        ) from error
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    held_out = torch.arange(len(data)) // _BLOCK % _EVERY == _EVERY - 1
    return Corpus(data[~held_out], data[held_out])


def unigram_entropy(data: Tensor) -> float:
    """Entropy in nats of the byte frequencies: the loss of the best model without context."""
    return float(torch.special.entr(torch.bincount(data.long()).double() / len(data)).sum())


def sample_batch(data: Tensor, batch: int, context: int, generator: torch.Generator) -> Batch:
    """``batch`` random windows of ``data``, which must be longer than ``context``."""
    first = torch.randint(len(data) - context, (batch, 1), generator=generator)
    windows = data[first + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
