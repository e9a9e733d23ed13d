"""delayed_scaling_update: the reference against a scalar oracle, kernels against the same."""

import itertools
import math

import numpy as np
import pytest
import torch

import grouped
from cute_kernels import backend
from tests.helpers import (
    BF16,
    E4M3,
    E5M2,
    F16,
    assert_all_same,
    assert_same_bytes,
    each_arch,
    seeded_generator,
)

TEXTS = {E4M3: "fp8:scaling=delayed", E5M2: "fp8:dtype=e5m2,scaling=delayed"}
FP8_MAX = {E4M3: 448.0, E5M2: 57344.0}
f32 = np.float32
FMAX = np.finfo(f32).max
INF, NAN = math.inf, math.nan
SPECIALS = (0.0, 1e-45, 1e-38, 448.0 / float(FMAX), 2e-36, 1.0, 448.0, 1e30, float(FMAX), INF, NAN)
np.seterr(all="ignore")


def oracle(history, scale, dtype, amax=None, margin=0, algorithm="max", skip_nonfinite=False):
    """Return the next history and scale of one tensor, in fp32 scalars."""
    history = [f32(h) for h in history]
    newest = history[0] if amax is None or amax == 0 else abs(f32(amax))
    if skip_nonfinite:
        history[0] = newest = newest if math.isfinite(newest) else f32(0)
    if newest == 0:
        return history, f32(scale)
    history = [*history[1:], newest]
    largest = f32(0)
    for h in history:
        if h > largest:  # false for NaN
            largest = h
    basis = largest if algorithm == "max" else newest
    if not (math.isnan(basis) or math.isinf(basis)) and basis > 0:
        scale = f32(f32(FP8_MAX[dtype] * 2.0**-margin) / basis)
        if math.isinf(scale):
            scale = FMAX
    history[0] = f32(0)
    return history, f32(scale)


def apply_oracle(history, scale, dtype, amax=None, **options):
    """Apply the oracle to each column and return the history and the scales."""
    amaxes = [None] * len(scale) if amax is None else amax.tolist()
    columns = zip(history.T.tolist(), scale.tolist(), amaxes, strict=True)
    results = [oracle(*column[:2], dtype, column[2], **options) for column in columns]
    return torch.tensor(np.array([h for h, _ in results]).T.copy()), torch.tensor(
        np.array([s for _, s in results])
    )


def check(history, scale, dtype, amax=None, **options):
    """Compare the op with the oracle; it updates history and scale in place."""
    want_history, want_scale = apply_oracle(history, scale, dtype, amax, **options)
    grouped.delayed_scaling_update(history, scale, dtype, amax=amax, **options)
    assert_same_bytes(history, want_history, "history", any_nan=True)
    assert_same_bytes(scale, want_scale, "scale")


@pytest.mark.parametrize("skip_nonfinite", [False, True])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("dtype", [*TEXTS])
def test_random_histories_step_by_step(dtype, algorithm, skip_nonfinite):
    rng = seeded_generator(7)
    for length, margin in itertools.product((1, 2, 3, 8), (0, 3, -2)):
        history, scale = torch.zeros(length, 40), torch.ones(40)
        for step in range(12):
            choice = torch.randint(0, len(SPECIALS) + 12, (40,), generator=rng)
            amaxes = torch.rand(40, generator=rng).exp()
            for i, value in enumerate(SPECIALS):
                amaxes[choice == i] = value
            amax = None
            if step % 3 == 2:
                # Amaxes are given and in row 0; where one is zero, the other counts.
                amax, amaxes = amaxes * torch.where(choice % 2 == 0, -1, 1), amaxes.roll(1)
            history[0] = amaxes
            check(
                history,
                scale,
                dtype,
                amax,
                margin=margin,
                algorithm=algorithm,
                skip_nonfinite=skip_nonfinite,
            )


def arguments(**changes):
    return {"amax_history": torch.rand(4, 3), "scale": torch.ones(3), "fmt": E4M3} | changes


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"amax_history": torch.rand(3)}, ValueError, "amax_history must have 2 dimensions"),
        ({"amax_history": torch.rand(0, 3)}, ValueError, "at least one row"),
        ({"amax_history": torch.rand(4, 3).double()}, TypeError, "amax_history must be float32"),
        ({"amax_history": torch.rand(3, 4).T}, ValueError, "amax_history is written in place"),
        ({"scale": torch.ones(3, dtype=BF16)}, TypeError, "scale must be float32"),
        ({"amax": torch.ones(2)}, ValueError, "amax must have size 3"),
        ({"amax": torch.ones(3, device="meta")}, ValueError, "amax must be on the device"),
        ({"margin": 200}, ValueError, "margin must leave 448.0"),
        ({"margin": True}, TypeError, "margin must be an integer"),
        ({"algorithm": "mean"}, ValueError, "algorithm must be max or most_recent"),
        ({"fmt": grouped.FP8()}, ValueError, "must take scales from the caller"),
        ({"fmt": F16}, ValueError, "dtype must be"),
        ({"fmt": "fp8"}, TypeError, "fmt must be a format record"),
        ({"scale": torch.ones(3, requires_grad=True)}, RuntimeError, "scale requires a gradient"),
    ],
)
def test_invalid_arguments_raise(change, error, message):
    """Check that invalid arguments raise and leave the history unchanged."""
    call = arguments(**change)
    history = call.pop("amax_history")
    before = history.clone()
    with pytest.raises(error, match=message):
        grouped.delayed_scaling_update(history, **call)
    assert history.equal(before)


@pytest.mark.emulated
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@each_arch
def test_kernels_have_the_bits_of_the_oracle(arch, algorithm):
    """Compare the kernel with the bits of a NumPy oracle."""
    rng = seeded_generator(3)
    specials = torch.tensor([*SPECIALS, *torch.rand(5, generator=rng).exp()])
    for length in (1, 2, 3, 600):
        choice = torch.randint(0, len(specials), (length, 30), generator=rng)
        # Kernels accept any address.
        history, scale = specials[choice], torch.ones(31)[1:]
        for i, options in enumerate(({}, {"mode": "chaos", "seed": length}, {"races": True})):
            amax = specials[torch.randint(0, len(specials), (30,), generator=rng)]
            amax[::2] *= -1
            with backend(f"emulated:{arch}", **options):
                amax_or_none = None if i == 1 else amax
                for skip in (False, True):
                    check(
                        history,
                        scale,
                        E4M3,
                        amax_or_none,
                        margin=i,
                        algorithm=algorithm,
                        skip_nonfinite=skip,
                    )
                    history[0] = specials[torch.randint(0, len(specials), (30,), generator=rng)]
    with backend(f"emulated:{arch}"):
        grouped.delayed_scaling_update(torch.zeros(4, 0), torch.zeros(0), E4M3)


@pytest.mark.compile
def test_a_compiled_update_has_the_same_bits():
    def update(history, scale, amax):
        history[0] = torch.maximum(history[0], amax)
        grouped.delayed_scaling_update(history, scale, E5M2, margin=1)
        return 1 / scale

    for dynamic in (None, True):
        torch._dynamo.reset()
        compiled = torch.compile(update, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        runs = []
        for function in (update, compiled):
            torch.manual_seed(3)
            history, scale = torch.rand(5, 3), torch.ones(3)
            inverse = [function(history, scale, torch.rand(3) * 2) for _ in range(3)]
            runs.append((history, scale, *inverse))
        assert_all_same(*runs)
    torch._dynamo.reset()
