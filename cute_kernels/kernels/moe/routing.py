"""Sort of tokens by expert: a stable counting sort in one launch.

Pairs of a token and an expert are numbered token by token. Each warp of a cluster has a run of
consecutive pairs. It counts the experts of its run in shared memory, the cluster adds up the
counts, and each warp goes through its run once more, knowing where its first pair of each expert
goes. If there are more than ``_WINDOW`` experts, that many are sorted at a time.

Scattered stores of four bytes take most of the time, so many clusters share them: each cluster
counts all pairs, and places those of its share of each run.

Shared memory:  counts of one warp per row, for its share and for the part of the run before it.
                They become the positions of its pairs. Also the counts of each CTA, which it
                writes to all CTAs of its cluster between two barriers.
"""

from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute, range_constexpr

from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.groups import warp_scan
from cute_kernels.device.launch import DSL_TYPES, compact, env_stream
from cute_kernels.device.ptx import asm, asm_volatile

from .config import RoutingConfig

#: Experts that are counted at a time, if there are as many threads.
_WINDOW = 512
#: Clusters, as many as an H200 holds at once. No cluster waits for another.
_CLUSTERS = 16
#: Ids that a lane loads at once.
_LOADS = 4


class RoutingKernel:
    """Kernel that sorts pairs by expert. See the module's docstring."""

    def __init__(self, config: RoutingConfig):
        self.ctas, self.warps = config.ctas, config.warps
        self.threads = WARP_SIZE * config.warps
        self.mapped = config.mapped
        self.window = min(_WINDOW, self.threads)

    @staticmethod
    def fake_args(config: RoutingConfig) -> tuple[Any, ...]:
        """Return stand-ins for the arguments, see ``RoutingConfig.kernel``."""
        pairs = cute.sym_int()
        ids, offs = compact(DSL_TYPES[config.ids], pairs), compact(Int32, cute.sym_int(), align=4)
        expert_map = compact(Int32, cute.sym_int(), align=4) if config.mapped else None
        return (
            ids,
            expert_map,
            offs,
            *(compact(Int32, pairs, align=4) for _ in range(3)),
            Int32(1),
            env_stream(),
        )

    @cute.jit
    def __call__(
        self,
        ids: cute.Tensor,
        expert_map: cute.Tensor | None,
        offs: cute.Tensor,
        token: cute.Tensor,
        pair: cute.Tensor,
        row: cute.Tensor,
        top_k: Int32,
        stream: Any,
    ) -> None:
        """Launch as many clusters as there is work for, at most ``_CLUSTERS``."""
        rounds = cute.ceil_div(ids.shape[0], self.ctas * self.threads)
        clusters = cutlass.max(1, cutlass.min(rounds, _CLUSTERS))
        self.kernel(ids, expert_map, offs, token, pair, row, top_k).launch(
            grid=[self.ctas * clusters, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.ctas, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        ids: cute.Tensor,
        expert_map: cute.Tensor | None,
        offs: cute.Tensor,
        token: cute.Tensor,
        pair: cute.Tensor,
        row: cute.Tensor,
        top_k: Int32,
    ) -> None:
        """Sort the pairs.

        Args:
            ids: (T * top_k,) int32 or int64. Id of each pair's expert.
            expert_map: (N,) int32. Expert of each id, or None if they are equal.
            offs: (E,) int32. Output, the end row of each expert.
            token: (T * top_k,) int32. Output, the token of each row, or -1.
            pair: (T * top_k,) int32. Output, the pair of each row, or -1.
            row: (T * top_k,) int32. Output, the row of each pair, or -1.
            top_k: Experts of a token.
        """
        smem = cutlass.memory.SmemAllocator()
        layout = cute.make_layout((self.window, self.warps, 2))
        counts = smem.allocate_tensor(Int32, layout, byte_alignment=16)
        layout = cute.make_layout((self.window, self.ctas))
        cta_counts = smem.allocate_tensor(Int32, layout, byte_alignment=16)
        sums = smem.allocate_tensor(Int32, cute.make_layout(WARP_SIZE), byte_alignment=16)
        tid, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        cta, blocks = block % self.ctas, cute.arch.grid_dim()[0]
        warp, lane = tid // WARP_SIZE, tid % WARP_SIZE
        experts, pairs = offs.shape[0], ids.shape[0]
        # A run is a number of whole rounds of a warp; this cluster places some of them.
        rounds = cute.ceil_div(pairs, self.ctas * self.threads)
        run_begin = cutlass.min((cta * self.warps + warp) * rounds * WARP_SIZE, pairs)
        run_end = cutlass.min(run_begin + rounds * WARP_SIZE, pairs)
        share = cute.ceil_div(rounds, blocks // self.ctas) * WARP_SIZE
        share_begin = cutlass.min(run_begin + block // self.ctas * share, run_end)
        num_placed, base = Int32(0), Int32(0)
        while base < experts:
            width = cutlass.min(experts - base, Int32(self.window))
            index = tid
            while index < cute.size(counts):
                counts[index] = Int32(0)
                index += self.threads
            cute.arch.sync_threads()
            self.count(ids, expert_map, counts, base, width, run_begin, share_begin, run_end)
            cute.arch.sync_threads()
            cta_count, rows_before, total = Int32(0), Int32(0), Int32(0)
            if tid < self.window:
                for w in cutlass.range(self.warps, unroll=8):
                    cta_count += counts[tid, w, 0] + counts[tid, w, 1]
            # After this the other CTAs run, and have read the counts of the previous window.
            self.cluster_sync()
            if tid < self.window:
                self.broadcast_count(cta_counts, tid, cta, cta_count)
            self.cluster_sync()
            if tid < self.window:
                for c in range_constexpr(self.ctas):
                    count = cta_counts[tid, c]
                    if cta > c:
                        rows_before += count
                    total += count
            end_row = warp_scan(total, lane)
            if lane == WARP_SIZE - 1:
                sums[warp] = end_row
            cute.arch.sync_threads()
            warp_sums = Int32(0)
            if lane < self.warps:
                warp_sums = sums[lane]
            warp_sums = warp_scan(warp_sums, lane)
            if warp > 0:
                end_row += cute.arch.shuffle_sync(warp_sums, warp - 1)
            end_row += num_placed
            num_placed += cute.arch.shuffle_sync(warp_sums, WARP_SIZE - 1)
            if tid < width:
                if block == 0:
                    offs[base + tid] = end_row
                first_place = end_row - total + rows_before
                for w in cutlass.range(self.warps, unroll=8):
                    count = counts[tid, w, 0]
                    first_place += counts[tid, w, 1]
                    counts[tid, w, 0] = first_place
                    first_place += count
            cute.arch.sync_threads()
            self.place_pairs(
                ids,
                expert_map,
                counts,
                token,
                pair,
                row,
                top_k,
                base,
                width,
                share_begin,
                cutlass.min(share_begin + share, run_end),
            )
            cute.arch.sync_threads()
            base += self.window
        # The tail: as many rows as there are pairs of no expert.
        index = num_placed + block * self.threads + tid
        while index < pairs:
            token[index] = Int32(-1)
            pair[index] = Int32(-1)
            index += blocks * self.threads

    @cute.jit
    def load_expert(self, ids: cute.Tensor, expert_map: cute.Tensor | None, pair: Int32) -> Any:
        """Return the expert of a pair: negative, or past the last one, if it has none."""
        expert = ids[pair]
        if const_expr(self.mapped):
            expert = self.map_id(expert, expert_map)
        return expert

    @cute.jit
    def map_id(self, expert_id: Any, expert_map: cute.Tensor) -> Int32:
        """Return the expert of an id, -1 for one outside of the map."""
        expert = Int32(-1)
        if expert_id >= 0:
            if expert_id < expert_map.shape[0]:
                expert = expert_map[expert_id]
        return expert

    @cute.jit
    def count(
        self,
        ids: cute.Tensor,
        expert_map: cute.Tensor | None,
        counts: cute.Tensor,
        base: Int32,
        width: Int32,
        run_begin: Int32,
        share_begin: Int32,
        run_end: Int32,
    ) -> None:
        """Count a warp's pairs by expert, separately before and from ``share_begin`` on."""
        warp = cute.arch.thread_idx()[0] // WARP_SIZE
        keys = cute.make_rmem_tensor(_LOADS, Int32)
        start = run_begin + cute.arch.lane_idx()
        while start < run_end:
            for i in range_constexpr(_LOADS):
                keys[i] = Int32(-1)
                if start + i * WARP_SIZE < run_end:
                    local = self.load_expert(ids, expert_map, start + i * WARP_SIZE) - base
                    if local >= 0:
                        if local < width:
                            keys[i] = Int32(local)
            for i in range_constexpr(_LOADS):
                if keys[i] >= 0:
                    is_before = Int32(start + i * WARP_SIZE < share_begin)
                    pointer = counts.iterator + (
                        keys[i] + (warp + is_before * self.warps) * self.window
                    )
                    cute.arch.atomic_add(pointer, Int32(1), sem="relaxed", scope="cta")
            start += _LOADS * WARP_SIZE

    @cute.jit
    def place_pairs(
        self,
        ids: cute.Tensor,
        expert_map: cute.Tensor | None,
        counts: cute.Tensor,
        token: cute.Tensor,
        pair: cute.Tensor,
        row: cute.Tensor,
        top_k: Int32,
        base: Int32,
        width: Int32,
        share_begin: Int32,
        share_end: Int32,
    ) -> None:
        """Assign rows to a warp's pairs, in order."""
        warp, lane = cute.arch.thread_idx()[0] // WARP_SIZE, cute.arch.lane_idx()
        start = share_begin
        while start < share_end:
            index = start + lane
            # One key for all pairs that are not placed now.
            key = Int32(-1)
            if index < share_end:
                local = self.load_expert(ids, expert_map, index) - base
                if local >= 0:
                    if local < width:
                        key = Int32(local)
                if base == 0:
                    if key < 0:
                        row[index] = Int32(-1)
            equal_keys = Int32(cute.arch.match_sync(0xFFFFFFFF, key))
            rank = cute.arch.popc(equal_keys & ((1 << lane) - 1))
            target = Int32(0)
            if key >= 0:
                target = counts[key, warp, 0] + rank
            cute.arch.sync_warp()
            if key >= 0:
                if rank == cute.arch.popc(equal_keys) - 1:
                    counts[key, warp, 0] = target + 1
                row[index] = target
                pair[target] = index
                token[target] = index // top_k
            cute.arch.sync_warp()
            start += WARP_SIZE

    @cute.jit
    def broadcast_count(
        self, cta_counts: cute.Tensor, expert: Int32, cta: Int32, count: Int32
    ) -> None:
        """Write this CTA's count of an expert to all CTAs of the cluster."""
        if const_expr(self.ctas == 1):
            cta_counts[expert, 0] = count
        else:
            local_address = Int32((cta_counts.iterator + (expert + cta * self.window)).toint())
            for c in range_constexpr(self.ctas):
                remote_address = asm(
                    "mapa.shared::cluster.u32 $0, $1, $2;", [Int32], [local_address, Int32(c)]
                )
                asm_volatile("st.shared::cluster.u32 [$0], $1;", [remote_address, count])

    @cute.jit
    def cluster_sync(self) -> None:
        """Synchronize the threads of the cluster."""
        if const_expr(self.ctas == 1):
            cute.arch.sync_threads()
        else:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
