"""English training text from the Python installation, as bytes."""

import dataclasses

import torch
from torch import Tensor

#: Inputs and targets, both (batch, context) int64. Targets are the next bytes of the inputs.
Batch = tuple[Tensor, Tensor]
_BLOCK, _EVERY = 4096, 10


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Disjoint texts for training and for validation, as uint8 vectors."""

    train: Tensor
    validation: Tensor

    def check_context(self, context: int) -> None:
        """Raise ValueError unless both texts are longer than ``context`` bytes."""
        shorter = min(len(self.train), len(self.validation))
        if context >= shorter:
            raise ValueError(
                f"context must be less than the {shorter} bytes of text, got {context}"
            )


def load_corpus() -> Corpus:
    """Load the help texts of Python's language reference (``pydoc_data.topics``), in name order.

    Every tenth block of 4 KiB is for validation.

    Raises:
        RuntimeError: This Python was installed without the texts.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError(
            "this Python has no pydoc_data.topics, the text that the demo trains on; install the "
            "complete standard library"
        ) from error
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    validation = torch.arange(len(data)) // _BLOCK % _EVERY == _EVERY - 1
    return Corpus(data[~validation], data[validation])


def unigram_entropy(data: Tensor) -> float:
    """Return the entropy in nats of the byte frequencies: the loss without context."""
    return float(torch.special.entr(torch.bincount(data.long()).double() / len(data)).sum())


def sample_batch(data: Tensor, batch: int, context: int, generator: torch.Generator) -> Batch:
    """Return ``batch`` random windows of ``data``, which must be longer than ``context``."""
    start = torch.randint(len(data) - context, (batch, 1), generator=generator)
    windows = data[start + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
