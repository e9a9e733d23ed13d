"""Quantizing kernels: inputs, poisoned buffers, launches, and the expected bytes."""

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
#: NVFP4 has no outputs for its global scale besides amaxes.
NO_RESULTS = (None, None)
#: The tile quantizer has no outputs for amaxes either.
NO_TILE_RESULTS = (None,) * 7
#: Seed of stochastic rounding; all bits of both numbers count except the last.
SEED = torch.tensor([-0x0123456789ABCDF, 0x7EDCBA9876543210])

#: If set, kernels for this GPU's architecture run on the GPU.
ON_GPU = bool(os.environ.get("CUTE_KERNELS_TEST_GPU"))


def ragged_cases(odd, *cols):
    """Return (rows of the buffer, K, end rows) by the case that each covers.

    ``odd`` is the name of the case with odd row counts.
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
    """Return the kernel for its architecture. On a GPU, CPU tensors are copied there and back."""
    if ON_GPU:
        name = device_architecture(0).name
        if getattr(config, "arch", name) != name:
            pytest.skip(f"a kernel for {config.arch}, and this GPU has {name}")
        return functools.partial(_run_on_gpu, config)
    return compile_for_emulator(config, getattr(config, "arch", ARCH))


def _run_on_gpu(config, *arguments):
    """Copy the tensors to the GPU, run the kernel, and copy them back."""
    kernel = compile_kernel(config, device_architecture(0))
    gpu_arguments = [_to_gpu(value) if isinstance(value, Tensor) else value for value in arguments]
    kernel(*gpu_arguments)
    for value, gpu_value in zip(arguments, gpu_arguments, strict=True):
        if isinstance(value, Tensor):
            value.copy_(gpu_value)


def _to_gpu(value):
    extent = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    buffer = torch.full((extent + 1,), 0, dtype=value.dtype, device="cuda")
    return buffer.as_strided(value.shape, value.stride()).copy_(value)


@dataclasses.dataclass
class Problem:
    """x: (T, K), or (G, N, K) if the groups are uniform and ``offs`` is None."""

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
        """Return output buffers full of garbage, so that wrong writes show; amaxes are vectors."""
        groups = None if self.offs is None else len(self.offs)
        specs = buffers(fmt, self.x.shape, groups, rowwise=rowwise, columnwise=columnwise)
        tensors = {
            name: poisoned(spec.allocate(torch.device("cpu"), False))
            for name, spec in specs.items()
        }
        return {name: t.flatten() if name.startswith("amax") else t for name, t in tensors.items()}

    def scales(self, fmt):
        """Return one given scale per group, if the format takes them."""
        return (
            torch.exp2(torch.arange(len(self.groups)) % 17 - 8.0) * 1.3
            if fmt.has_given_scale
            else None
        )


def ragged(rows, cols, offs, dtype="bfloat16", seed=0):
    """Return the problem of a case of ``ragged_cases``, with NaN in the tail."""
    x = random_input((rows, cols), DTYPES[dtype], seed)
    x[int(offs[-1]) :] = torch.nan
    return Problem(x, offs)


def expected(problem, fmt, rowwise, columnwise, amax=None, blocks_before=(0, 0)):
    """Return the reference's buffers by name.

    ``blocks_before`` counts the random blocks that precede the problem, per direction.
    """
    out = problem.buffers(fmt, rowwise, columnwise)
    random_numbers = (
        reference.SeededRandomNumbers(SEED, problem.x.shape[-1], blocks_before)
        if fmt.is_stochastic
        else None
    )
    inputs = reference.QuantizeInputs(amax, problem.scales(fmt), random_numbers)
    reference.quantize(reference.Elements(problem.x), problem.groups, fmt, out, inputs)
    return out


def directions_of(config):
    """Return the copies that the kernel makes: (rowwise, columnwise)."""
    return (config.rowwise, config.columnwise) if isinstance(config, TileConfig) else (True, False)


def quantize(config, problem, given_amax=None):
    """Return the kernel's buffers by name; given amaxes come from the reference."""
    fmt, is_tiles = parse(config.format), isinstance(config, TileConfig)
    out = problem.buffers(fmt, *directions_of(config))
    computes = config.compute_amax if is_tiles else config.computes_amax
    if fmt.global_scale is not None and not (computes or fmt.has_given_scale):
        reference_buffers = expected(problem, fmt, directions_of(config)[0], is_tiles, given_amax)
        out |= {name: reference_buffers[name] for name in ("amax", "amax_t") if name in out}
    amax, amax_t = map(out.get, ("amax", "amax_t"))
    results = map(out.get, ("scale_inv", "scale"))
    if not is_tiles:
        launch(config, *problem.inputs, amax, out["codes"], out.get("scales"), *results)
        return out
    group_amax = amax if amax_t is None or config.has_column_amax else amax_t
    if group_amax is amax_t and amax is not None and not config.uses_row_amax:
        out["amax"] = group_amax
    amaxes = (
        amax if config.uses_row_amax else None,
        (problem.scales(fmt) if fmt.has_given_scale else group_amax)
        if config.uses_group_amax
        else None,
    )
    copies = map(out.get, ("codes", "scales", "codes_t", "scales_t"))
    amax_outputs = (
        amax if fmt.has_given_scale else None,
        amax_t if config.has_column_amax else None,
    )
    seed = SEED if fmt.is_stochastic else None
    launch(config, *problem.inputs, *amaxes, *copies, *results, *amax_outputs, seed, None, None)
    return out


def launch(config, *arguments):
    """Run the kernel, which may touch its arguments only."""
    with watching(*arguments):
        compiled(config)(*arguments, NUM_SMS)


def check(config, problem, given_amax=None, **options):
    """Check the kernel's bytes against the reference."""
    want = expected(problem, parse(config.format), *directions_of(config), given_amax)
    with emulator.options(**options):
        assert_same_buffers(quantize(config, problem, given_amax), want)


def random_input(shape, dtype, seed=0):
    """Return normal values with rows and blocks of zeros, and one magnitude per row."""
    generator = seeded_generator(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-6, 7, (*shape[:-1], 1), generator=generator).float())
    x[..., torch.rand(shape[:-1], generator=generator) < 0.05, :] = 0.0
    blocks = x.unflatten(-1, (-1, 16))
    blocks[torch.rand(blocks.shape[:-1], generator=generator) < 0.05] = 0.0
    return blocks.flatten(-2).to(dtype)


def special_input(rows, cols, dtype):
    """Return special values; each row has its own mixture, so rows of one group differ too."""
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
