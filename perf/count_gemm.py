"""Count what the sm_100a NVFP4 grouped GEMM executes and moves, on the emulator.

    python -m perf.count_gemm [--cases balanced ragged] [--tiles 256x256t 128x32s]
        [--sizes 432,80,160] [--n 2048] [--k 2048]

``work`` is MMA work over useful work: rows of tiles that no group has count as waste. ``load`` and
``store`` are megabytes by TMA, ``direct`` megabytes by ordinary stores. ``warp`` is thousands of
warp instructions, of PTX; a wait counts once, however long it lasts. ``waves`` is thousands of
shared-memory wavefronts of ordinary accesses. Registers are of the machine code. The tile that the
ops choose for these sizes is marked with a star; they know the rows of all groups together only.
Each product is first compared, on a sample, with what a tensor core gives.

Rows named "example" are NVIDIA's CuTe DSL example of a scaled grouped GEMM for MoE (CUTLASS,
``blackwell/kernel/moe/torch_scaled_grouped_mm.py``, without a factor per row) on the same emulator.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch

from cute_kernels import emulator
from cute_kernels.gemm.config import TILE_SHAPES, GemmConfig, GemmProblem, TileShape
from cute_kernels.gemm.heuristics import choose_config
from cute_kernels.layout.shapes import ceil_div, num_slot_tiles, scale_tiles, slot_tile
from cute_kernels.reference.groups import untile_scales
from cute_kernels.reference.tensor_core import tensor_core_gemm

ARCH = "sm_100a"
NUM_SMS = 8
_SAMPLE = 16
#: Rows of each group. The last two are routings that the example drew.
CASES = {
    "balanced": [256] * 8,
    "ragged": [37, 150, 299, 1, 80, 212, 5, 266],
    "routed": [432, 80, 160, 32, 176, 128, 560, 480],
    "skewed": [16, 16, 240, 192, 416, 1040, 16, 112],
}
#: Work, load, store, warp instructions and wavefronts of the example, N = K = 2048.
EXAMPLE = {
    ("balanced", "256x256"): (1.00, 37.7, 8.4, 610, 69),
    ("balanced", "256x128"): (1.00, 56.6, 8.4, 781, 73),
    ("balanced", "128x128"): (1.00, 75.5, 8.4, 871, 73),
    # It takes groups of whole 16 rows only: of 48 160 304 16 80 224 16 272.
    ("ragged", "256x256"): (2.44, 47.2, 10.5, 760, 87),
    ("ragged", "256x128"): (2.44, 70.8, 10.5, 974, 91),
    ("ragged", "128x128"): (1.71, 66.1, 7.3, 764, 64),
    ("routed", "256x256"): (1.50, 56.6, 12.6, 910, 104),
    ("routed", "128x128"): (1.25, 94.4, 10.5, 1087, 91),
    ("skewed", "256x256"): (1.63, 61.3, 13.6, 986, 113),
    ("skewed", "128x128"): (1.31, 99.1, 11.0, 1142, 96),
}


@dataclasses.dataclass
class Operands:
    """Random codes and scales of an m_grouped product, all amaxes 2688 so that factors are 1."""

    a: torch.Tensor
    a_scales: torch.Tensor
    b: torch.Tensor
    b_scales: torch.Tensor
    offs: torch.Tensor

    @classmethod
    def random(cls, sizes: list[int], n: int, k: int) -> Operands:
        """Operands of groups of ``sizes`` rows."""
        generator = torch.Generator().manual_seed(0)
        rows, groups = sum(sizes), len(sizes)

        def codes(*shape: int) -> torch.Tensor:
            return torch.randint(256, shape, dtype=torch.uint8, generator=generator)

        def scales(*shape: int) -> torch.Tensor:
            # E4M3 from 1/8 to 16.
            return torch.randint(0x20, 0x58, shape, dtype=torch.uint8, generator=generator)

        k_tiles = scale_tiles(k, 16)
        return cls(
            codes(rows, k // 2),
            scales(num_slot_tiles(rows, groups), k_tiles, 512),
            codes(groups, n, k // 2),
            scales(groups, ceil_div(n, 128), k_tiles, 512),
            torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32),
        )

    @property
    def useful_flops(self) -> float:
        """Work of the products themselves."""
        rows, packed_k = self.a.shape
        return 2.0 * rows * self.b.shape[1] * 2 * packed_k

    def run(self, config: GemmConfig) -> torch.Tensor:
        """The (T, N) bf16 output of one launch."""
        from perf.compiled import compile_for_emulator

        rows, groups = len(self.a), len(self.b)
        ones = torch.full((max(rows, groups),), 2688.0)
        out = torch.empty(rows, self.b.shape[1], dtype=torch.bfloat16)
        compile_for_emulator(config, ARCH).run(
            *(self.a, self.a_scales, ones[:rows], self.b, self.b_scales, ones[:groups]),
            *(self.offs, None, None, out, NUM_SMS),
        )
        return out

    def check(self, out: torch.Tensor) -> None:
        """Compare the corner of each group's product."""
        start = 0
        blocks = self.a.shape[1] * 2 // 16
        for group, end in enumerate(self.offs.tolist()):
            rows = min(_SAMPLE, end - start)
            if rows > 0:
                slot = slot_tile(start, group)
                operands = (self.a[start : start + rows], self.b[group, :_SAMPLE])
                tiles = (self.a_scales[slot], self.b_scales[group, 0])
                a_sf, b_sf = (
                    untile_scales(t[None], blocks).view(torch.float8_e4m3fn) for t in tiles
                )
                want = tensor_core_gemm(
                    ARCH, *operands, a_scales=a_sf[:rows], b_scales=b_sf[:_SAMPLE]
                )
                factor = torch.tensor(2688.0) * torch.tensor(1 / 2688)
                want = (want * (factor * factor)).to(out.dtype)
                torch.testing.assert_close(
                    out[start : start + rows, :_SAMPLE], want, rtol=0, atol=0
                )
            start = end


def tile_name(tile: TileShape) -> str:
    """Size of a tile; with an s if its operands are swapped, a t if only those of tails are."""
    return f"{tile.m}x{tile.n}{'s' * tile.swap_ab}{'t' * tile.swap_tails}"


def report(tile: TileShape, operands: Operands, is_chosen: bool) -> None:
    """Print one line of the table."""
    from perf.compiled import compile_for_emulator
    from perf.cubin import read_resources

    config = GemmConfig("nvfp4", row_scaled=True, tile=tile)
    emulator.reset_stats()
    out = operands.run(config)
    stats = emulator.stats()
    operands.check(out)
    resources = read_resources(compile_for_emulator(config, ARCH).cubin).values()
    cells = (
        f"{stats['mma_flops'] / operands.useful_flops:8.2f}",
        f"{stats['tma_load_bytes'] / 1e6:8.1f}",
        f"{stats['tma_store_bytes'] / 1e6:8.1f}",
        f"{stats['st_global_bytes'] / 1e6:8.1f}",
        f"{stats['warp_insns'] / 1e3:8.0f}",
        f"{stats['smem_wavefronts'] / 1e3:8.0f}",
        f"{max(r.registers for r in resources):8d}",
    )
    print(f"{tile_name(tile) + ' *' * is_chosen:18}" + "".join(cells), flush=True)


def report_case(case: str, sizes: list[int], n: int, k: int, tiles: list[str]) -> None:
    """Print the table of one list of group sizes."""
    print(f"{case}: rows {' '.join(map(str, sizes))}, N {n}, K {k}, {NUM_SMS} SMs")
    heads = ("work", "load", "store", "direct", "warp", "waves", "regs")
    print(f"{'tile':18}" + "".join(f"{head:>8}" for head in heads))
    for (of, name), (work, load, store, warp, waves) in EXAMPLE.items():
        if of == case and (n, k) == (2048, 2048):
            cells = f"{work:8.2f}{load:8.1f}{store:8.1f}{'':8}{warp:8d}{waves:8d}"
            print(f"{'example ' + name:18}" + cells)
    operands = Operands.random(sizes, n, k)
    problem = GemmProblem("nvfp4", "m_grouped", "bfloat16", len(sizes), sum(sizes), n, k=k)
    chosen = choose_config(GemmConfig("nvfp4", row_scaled=True), problem, NUM_SMS).tile
    for tile in TILE_SHAPES:
        if tile_name(tile) in tiles:
            report(tile, operands, tile == chosen)
    print()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["balanced", "ragged"])
    parser.add_argument("--sizes", help="rows of each group, instead of --cases")
    parser.add_argument("--n", type=int, default=2048)
    parser.add_argument("--k", type=int, default=2048)
    names = [tile_name(tile) for tile in TILE_SHAPES]
    parser.add_argument("--tiles", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    emulator.install(arch=ARCH)
    cases = {case: CASES[case] for case in options.cases}
    if options.sizes:
        cases = {"given": [int(size) for size in options.sizes.split(",")]}
    for case, sizes in cases.items():
        report_case(case, sizes, options.n, options.k, options.tiles)


if __name__ == "__main__":
    main()
