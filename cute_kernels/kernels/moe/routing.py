"""Tokens sorted by expert: a stable counting sort in one launch.

Pairs of a token and an expert are numbered token by token. Each warp of a cluster has a run of
consecutive ones. It counts its experts in shared memory, the cluster adds up, and each warp goes
through its run once more, which now knows where its first pair of each expert goes. More than
``_WINDOW`` experts are sorted so many at a time.

Scattered stores of four bytes take longest, so many clusters share them: each counts all pairs, and
places those of its share of each run.

Shared memory:  counts of one warp a row, of its share and of what lies before it in the run, turned
        into the places of its pairs; the counts of each CTA, which it writes to all of its cluster
        between two barriers.
"""

from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute, range_constexpr

from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.groups import warp_scan
from cute_kernels.device.launch import DSL_TYPES, compact, env_stream
from cute_kernels.device.ptx import asm, asm_volatile

from .config import RoutingConfig

#: Experts that are counted at a time, if there is a thread for each.
_WINDOW = 512
#: Clusters, as many as an H200 holds at once. None waits for another.
_CLUSTERS = 16
#: Ids that a lane loads at once.
_LOADS = 4


class RoutingKernel:
    """Sorts pairs by expert, see the module."""

    def __init__(self, config: RoutingConfig):
        self.ctas, self.warps = config.ctas, config.warps
        self.threads = WARP_SIZE * config.warps
        self.window = min(_WINDOW, self.threads)

    @staticmethod
    def fake_args(config: RoutingConfig) -> tuple[Any, ...]:
        pairs = cute.sym_int()
        ids, offs = compact(DSL_TYPES[config.ids], pairs), compact(Int32, cute.sym_int(), align=4)
        return (
            ids,
            offs,
            *(compact(Int32, pairs, align=4) for _ in range(3)),
            Int32(1),
            env_stream(),
        )

    @cute.jit
    def __call__(
        self,
        ids: cute.Tensor,
        offs: cute.Tensor,
        token: cute.Tensor,
        pair: cute.Tensor,
        row: cute.Tensor,
        top_k: Int32,
        stream: Any,
    ) -> None:
        rounds = cute.ceil_div(ids.shape[0], self.ctas * self.threads)
        clusters = cutlass.max(1, cutlass.min(rounds, _CLUSTERS))
        self.kernel(ids, offs, token, pair, row, top_k).launch(
            grid=[self.ctas * clusters, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.ctas, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        ids: cute.Tensor,
        offs: cute.Tensor,
        token: cute.Tensor,
        pair: cute.Tensor,
        row: cute.Tensor,
        top_k: Int32,
    ) -> None:
        smem = cutlass.memory.SmemAllocator()
        layout = cute.make_layout((self.window, self.warps, 2))
        counts = smem.allocate_tensor(Int32, layout, byte_alignment=16)
        layout = cute.make_layout((self.window, self.ctas))
        of_ctas = smem.allocate_tensor(Int32, layout, byte_alignment=16)
        sums = smem.allocate_tensor(Int32, cute.make_layout(WARP_SIZE), byte_alignment=16)
        tid, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        cta, blocks = block % self.ctas, cute.arch.grid_dim()[0]
        warp, lane = tid // WARP_SIZE, tid % WARP_SIZE
        experts, pairs = offs.shape[0], ids.shape[0]
        # Whole rounds of a warp, of which this cluster places some.
        rounds = cute.ceil_div(pairs, self.ctas * self.threads)
        first = cutlass.min((cta * self.warps + warp) * rounds * WARP_SIZE, pairs)
        end = cutlass.min(first + rounds * WARP_SIZE, pairs)
        share = cute.ceil_div(rounds, blocks // self.ctas) * WARP_SIZE
        mine = cutlass.min(first + block // self.ctas * share, end)
        placed, base = Int32(0), Int32(0)
        while base < experts:
            width = cutlass.min(experts - base, Int32(self.window))
            at = tid
            while at < cute.size(counts):
                counts[at] = Int32(0)
                at += self.threads
            cute.arch.sync_threads()
            self.count(ids, counts, base, width, first, mine, end)
            cute.arch.sync_threads()
            of_cta, before, total = Int32(0), Int32(0), Int32(0)
            if tid < self.window:
                for w in cutlass.range(self.warps, unroll=8):
                    of_cta += counts[tid, w, 0] + counts[tid, w, 1]
            # The others run, and have read what they got of the window before.
            self.cluster_sync()
            if tid < self.window:
                self.tell(of_ctas, tid, cta, of_cta)
            self.cluster_sync()
            if tid < self.window:
                for c in range_constexpr(self.ctas):
                    count = of_ctas[tid, c]
                    if cta > c:
                        before += count
                    total += count
            upto = warp_scan(total, lane)
            if lane == WARP_SIZE - 1:
                sums[warp] = upto
            cute.arch.sync_threads()
            of_warps = Int32(0)
            if lane < self.warps:
                of_warps = sums[lane]
            of_warps = warp_scan(of_warps, lane)
            if warp > 0:
                upto += cute.arch.shuffle_sync(of_warps, warp - 1)
            upto += placed
            placed += cute.arch.shuffle_sync(of_warps, WARP_SIZE - 1)
            if tid < width:
                if block == 0:
                    offs[base + tid] = upto
                place = upto - total + before
                for w in cutlass.range(self.warps, unroll=8):
                    count = counts[tid, w, 0]
                    place += counts[tid, w, 1]
                    counts[tid, w, 0] = place
                    place += count
            cute.arch.sync_threads()
            self.place(
                ids,
                counts,
                token,
                pair,
                row,
                top_k,
                base,
                width,
                mine,
                cutlass.min(mine + share, end),
            )
            cute.arch.sync_threads()
            base += self.window
        # The tail: as many rows as there are pairs of no expert.
        at = placed + block * self.threads + tid
        while at < pairs:
            token[at] = Int32(-1)
            pair[at] = Int32(-1)
            at += blocks * self.threads

    @cute.jit
    def count(
        self,
        ids: cute.Tensor,
        counts: cute.Tensor,
        base: Int32,
        width: Int32,
        first: Int32,
        mine: Int32,
        end: Int32,
    ) -> None:
        """Count a warp's pairs by expert, those before ``mine`` apart."""
        warp = cute.arch.thread_idx()[0] // WARP_SIZE
        keys = cute.make_rmem_tensor(_LOADS, Int32)
        start = first + cute.arch.lane_idx()
        while start < end:
            for i in range_constexpr(_LOADS):
                keys[i] = Int32(-1)
                if start + i * WARP_SIZE < end:
                    local = ids[start + i * WARP_SIZE] - base
                    if local >= 0:
                        if local < width:
                            keys[i] = Int32(local)
            for i in range_constexpr(_LOADS):
                if keys[i] >= 0:
                    before = Int32(start + i * WARP_SIZE < mine)
                    pointer = counts.iterator + (
                        keys[i] + (warp + before * self.warps) * self.window
                    )
                    cute.arch.atomic_add(pointer, Int32(1), sem="relaxed", scope="cta")
            start += _LOADS * WARP_SIZE

    @cute.jit
    def place(
        self,
        ids: cute.Tensor,
        counts: cute.Tensor,
        token: cute.Tensor,
        pair: cute.Tensor,
        row: cute.Tensor,
        top_k: Int32,
        base: Int32,
        width: Int32,
        first: Int32,
        end: Int32,
    ) -> None:
        """Give a warp's pairs their rows, in order."""
        warp, lane = cute.arch.thread_idx()[0] // WARP_SIZE, cute.arch.lane_idx()
        start = first
        while start < end:
            at = start + lane
            # One key for all that is not placed now.
            key = Int32(-1)
            if at < end:
                local = ids[at] - base
                if local >= 0:
                    if local < width:
                        key = Int32(local)
                if base == 0:
                    if key < 0:
                        row[at] = Int32(-1)
            alike = Int32(cute.arch.match_sync(0xFFFFFFFF, key))
            rank = cute.arch.popc(alike & ((1 << lane) - 1))
            place = Int32(0)
            if key >= 0:
                place = counts[key, warp, 0] + rank
            cute.arch.sync_warp()
            if key >= 0:
                if rank == cute.arch.popc(alike) - 1:
                    counts[key, warp, 0] = place + 1
                row[at] = place
                pair[place] = at
                token[place] = at // top_k
            cute.arch.sync_warp()
            start += WARP_SIZE

    @cute.jit
    def tell(self, of_ctas: cute.Tensor, expert: Int32, cta: Int32, count: Int32) -> None:
        """Write this CTA's count of an expert to all CTAs."""
        if const_expr(self.ctas == 1):
            of_ctas[expert, 0] = count
        else:
            at = Int32((of_ctas.iterator + (expert + cta * self.window)).toint())
            for c in range_constexpr(self.ctas):
                there = asm("mapa.shared::cluster.u32 $0, $1, $2;", [Int32], [at, Int32(c)])
                asm_volatile("st.shared::cluster.u32 [$0], $1;", [there, count])

    @cute.jit
    def cluster_sync(self) -> None:
        if const_expr(self.ctas == 1):
            cute.arch.sync_threads()
        else:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
