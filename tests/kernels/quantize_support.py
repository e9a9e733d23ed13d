import dataclasses
import functools
import os

import pytest
import torch
from torch import Tensor

import ptx_emulator as emulator
from cute_kernels import reference
from cute_kernels.formats import parse
from cute_kernels.kernels.quantize.config import TileConfig
from cute_kernels.layout.buffers import buffers
from cute_kernels.reference.groups import Groups
from cute_kernels.runtime.arch import device_architecture
from cute_kernels.runtime.compile import compile_kernel
from cute_kernels.testing.compiled import compile_for_emulator
from tests.helpers import DTYPES, assert_same_buffers, offs_tensor, poisoned, seeded_generator
from tests.kernels.op_support import watching

ARCH = "sm_100a"
NUM_SMS = 3
#: NVFP4 keeps nothing of its second level besides amaxes.
NO_RESULTS = (None, None)
#: Nor does the quantizer by tiles give its amaxes.
NO_TILE_RESULTS = (None,) * 7
#: Of stochastic formats: all bits of both numbers matter but the last.
SEED = torch.tensor([-0x0123456789ABCDF, 0x7EDCBA9876543210])

#: Run what this GPU can run on it; for configurations of its architecture.
ON_GPU = bool(os.environ.get("CUTE_KERNELS_TEST_GPU"))


def ragged_cases(odd, *cols):
    """(rows of the buffer, K, end rows) by what each is there to catch;

    ``odd`` says so of K beside odd rows.
    """
    cases = {
        "one group": (256, offs_tensor(256)),
        "one row": (1, offs_tensor(1)),
        odd: (300, offs_tensor(7, 136, 137, 300)),
        "empty first, middle, last": (200, offs_tensor(0, 0, 65, 65, 65, 190, 200, 200)),
        "all empty": (64, offs_tensor(0, 0, 0)),
        "tail": (260, offs_tensor(3, 131, 219)),
        "tile boundaries": (513, offs_tensor(127, 255, 384, 513)),
    }
    return {
        name: (rows, k, offs) for (name, (rows, offs)), k in zip(cases.items(), cols, strict=True)
    }


def compiled(config):
    """For its architecture; on a GPU CPU tensors are copied there and back, whatever it wrote."""
    if ON_GPU:
        name = device_architecture(0).name
        if getattr(config, "arch", name) != name:
            pytest.skip(f"a kernel for {config.arch}, and this GPU has {name}")
        return functools.partial(_run_on_gpu, config)
    return compile_for_emulator(config, getattr(config, "arch", ARCH))


def _run_on_gpu(config, *arguments):
    kernel = compile_kernel(config, device_architecture(0))
    there = [_to_gpu(value) if isinstance(value, Tensor) else value for value in arguments]
    kernel(*there)
    for value, copy in zip(arguments, there, strict=True):
        if isinstance(value, Tensor):
            value.copy_(copy)


def _to_gpu(value):
    extent = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    there = torch.full((extent + 1,), 0, dtype=value.dtype, device="cuda")
    return there.as_strided(value.shape, value.stride()).copy_(value)


@dataclasses.dataclass
class Problem:
    """x: (T, K), or (G, N, K) when uniform and ``offs`` is None."""

    x: Tensor
    offs: Tensor | None

    @property
    def inputs(self):
        return self.x, None, self.offs

    @property
    def matrix(self):
        return self.x.flatten(0, -2)

    @property
    def groups(self):
        if self.offs is None:
            return Groups.uniform(self.x.shape[0], self.x.shape[1], self.x.device)
        return Groups.ragged(self.offs, len(self.x))

    def buffers(self, fmt, rowwise, columnwise):
        """Full of garbage, so that a byte too many or too few shows; amaxes are vectors."""
        groups = None if self.offs is None else len(self.offs)
        specs = buffers(fmt, self.x.shape, groups, rowwise=rowwise, columnwise=columnwise)
        made = {
            name: poisoned(spec.allocate(torch.device("cpu"), False))
            for name, spec in specs.items()
        }
        return {name: t.flatten() if name.startswith("amax") else t for name, t in made.items()}

    def scales(self, fmt):
        """Of groups, if the format takes them."""
        return (
            torch.exp2(torch.arange(len(self.groups)) % 17 - 8.0) * 1.3
            if fmt.has_given_scale
            else None
        )


def ragged(rows, cols, offs, dtype="bfloat16", seed=0):
    """Of a case of ``ragged_cases``; NaN in the tail."""
    x = random_input((rows, cols), DTYPES[dtype], seed)
    x[int(offs[-1]) :] = torch.nan
    return Problem(x, offs)


def expected(problem, fmt, rowwise, columnwise, given=None, drawn=(0, 0)):
    out = problem.buffers(fmt, rowwise, columnwise)
    draws = (
        reference.SeededRandomNumbers(SEED, problem.x.shape[-1], drawn)
        if fmt.is_stochastic
        else None
    )
    beside = reference.QuantizeInputs(given, problem.scales(fmt), draws)
    reference.quantize(reference.Elements(problem.x), problem.groups, fmt, out, beside)
    return out


def directions_of(config):
    return (config.rowwise, config.columnwise) if isinstance(config, TileConfig) else (True, False)


def quantize(config, problem, given=None):
    """What the kernel makes; amaxes that it does not compute are those of the reference."""
    fmt, is_tiles = parse(config.format), isinstance(config, TileConfig)
    out = problem.buffers(fmt, *directions_of(config))
    computes = config.compute_amax if is_tiles else config.computes_amax
    if fmt.global_scale is not None and not (computes or fmt.has_given_scale):
        known = expected(problem, fmt, directions_of(config)[0], is_tiles, given)
        out |= {name: known[name] for name in ("amax", "amax_t") if name in out}
    amax, amax_t = map(out.get, ("amax", "amax_t"))
    results = map(out.get, ("scale_inv", "scale"))
    if not is_tiles:
        launch(config, *problem.inputs, amax, out["codes"], out.get("scales"), *results)
        return out
    group = amax if amax_t is None or config.has_column_amax else amax_t
    if group is amax_t and amax is not None and not config.uses_row_amax:
        out["amax"] = group
    levels = (
        amax if config.uses_row_amax else None,
        (problem.scales(fmt) if fmt.has_given_scale else group) if config.uses_group_amax else None,
    )
    copies = map(out.get, ("codes", "scales", "codes_t", "scales_t"))
    own = (amax if fmt.has_given_scale else None, amax_t if config.has_column_amax else None)
    seed = SEED if fmt.is_stochastic else None
    launch(config, *problem.inputs, *levels, *copies, *results, *own, seed, None, None)
    return out


def launch(config, *arguments):
    """Nothing else is touched."""
    with watching(*arguments):
        compiled(config)(*arguments, NUM_SMS)


def check(config, problem, given=None, **options):
    want = expected(problem, parse(config.format), *directions_of(config), given)
    with emulator.options(**options):
        assert_same_buffers(quantize(config, problem, given), want)


def random_input(shape, dtype, seed=0):
    generator = seeded_generator(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-6, 7, (*shape[:-1], 1), generator=generator).float())
    x[..., torch.rand(shape[:-1], generator=generator) < 0.05, :] = 0.0
    blocks = x.unflatten(-1, (-1, 16))
    blocks[torch.rand(blocks.shape[:-1], generator=generator) < 0.05] = 0.0
    return blocks.flatten(-2).to(dtype)


def special_input(rows, cols, dtype):
    """Special values; each row has its own mixture, so rows of one group clash as well."""
    info = torch.finfo(dtype)
    generator = seeded_generator(1)
    x = torch.randn(rows, cols, generator=generator)
    magnitude = torch.randint(-40, 36, (rows, cols // 16, 1), generator=generator).float()
    x = (x.unflatten(1, (-1, 16)) * torch.pow(10.0, magnitude)).flatten(1)
    x = x.clamp(-info.max, info.max)
    smallest = info.smallest_normal * info.eps
    for i, value in enumerate(
        (0.0, -0.0, info.max, -info.max, info.tiny, -info.tiny, smallest, -smallest)
    ):
        x[i % rows :: 9, i::11] = value
    x = x.to(dtype)
    x[1::7, ::5] = torch.nan
    x[2::7, 1::13] = torch.inf
    x[3::7, 2::13] = -torch.inf
    x[4::7, 16:32] = torch.nan
    x[5::17] = torch.nan
    x[6::17] = -0.0
    x[7::17] = smallest
    return x
