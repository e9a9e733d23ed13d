// cp.async.bulk: contiguous copies, and the groups that wait for stores.
#include <algorithm>
#include <cstring>

#include "memory.h"
#include "races.h"

void post_load(Warp& w, const Instruction& in, int lane, u32 ranks, u32 offset, u32 bytes,
               u32 barrier, const char* what, std::function<void(CTA*)> write) {
    Cluster* cluster = w.cta->cluster;
    const bool multicast = in.flags & F_MULTICAST, pair = in.flags & F_CTA2;
    machine.stats.tma_load_bytes += bytes;
    const Actor me = issue_async(w, LOAD_AGENT);
    const u64 fenced = w.fenced[lane];
    machine.post([=] {
        FOR_LANES (rank, ranks) {
            CTA* d = cluster->ctas[rank].get();
            if (d->exited) fail("%s into CTA rank %u, which has exited", what, rank);
            need_in_smem(d, offset, bytes, what);
            write(d);
            note_async_write(d, offset, bytes, me, fenced, what);
            // A multicast signals the same barrier offset in every destination; with cta_group::2
            // the one of the barrier's own half of the pair.
            u32 signalled = rank_of(barrier);
            if (multicast) signalled = pair ? (rank & ~1u) | (signalled & 1) : rank;
            mbarrier_complete(cta_at(cluster, signalled, "an mbarrier address"), offset_of(barrier),
                              bytes, me);
        }
    });
}

void post_store(CTA* source, std::vector<CopyGroupPtr> groups,
                std::function<void(std::vector<u8>&)> read,
                std::function<void(const std::vector<u8>&)> write) {
    for (auto& g : groups) g->reads++, g->writes++;
    source->pending_reads++;
    machine.post([=] {
        auto data = std::make_shared<std::vector<u8>>();
        read(*data);
        for (auto& g : groups) g->reads--;
        source->pending_reads--;
        machine.epoch++;
        machine.post([=] {
            write(*data);
            for (auto& g : groups) g->writes--;
            machine.epoch++;
        });
    });
}

static void need_16(u32 bytes, u64 from, u64 to, const char* what) {
    if (bytes % 16 || from % 16 || to % 16)
        fail("%s of %u bytes from %#llx to %#llx: size and both addresses must be multiples of 16",
             what, bytes, from, to);
}

// Operands: destination, source, size, mbarrier, [CTA mask].
INSTRUCTION(void, global_to_shared, BULK_G2S) {
    FOR_LANES (lane, mask) {
        const u32 to = shared_address(w, in, 0, lane), offset = offset_of(to);
        const u64 from = address_of(w, in, 1, lane);
        const u32 bytes = (u32)value_of(w, in, 2, lane);
        need_16(bytes, from, to, "bulk load");
        const u32 ranks = destinations(w, in, 4, lane, to, "bulk load");
        post_load(w, in, lane, ranks, offset, bytes, shared_address(w, in, 3, lane), "bulk load",
                  [=](CTA* d) {
                      machine.check_range(from, bytes, "bulk load");
                      memcpy(d->smem.data() + offset, (const void*)from, bytes);
                  });
    }
}

// Operands: destination, source, size.
INSTRUCTION(void, shared_to_global, BULK_S2G) {
    FOR_LANES (lane, mask) {
        const u64 to = address_of(w, in, 0, lane);
        const u32 from = shared_address(w, in, 1, lane);
        const u32 bytes = (u32)value_of(w, in, 2, lane);
        need_16(bytes, from, to, "bulk store");
        CTA* c;
        const u8* memory = shared_pointer(w, from, bytes, &c);
        machine.stats.tma_store_bytes += bytes;
        const Actor me = issue_async(w, STORE_AGENT);
        CopyGroupPtr group = w.bulk_stores.opened(lane);
        if (races_on) group->clock = me.clock[me.agent];
        {
            ActingScope scope(me);
            check_async_read(c, offset_of(from), bytes, w.fenced[lane], "bulk store");
        }
        post_store(
            c, {group}, [=](std::vector<u8>& data) { data.assign(memory, memory + bytes); },
            [=](const std::vector<u8>& data) {
                machine.check_range(to, bytes, "bulk store");
                memcpy((void*)to, data.data(), bytes);
            });
    }
}

INSTRUCTION(void, commit, BULK_COMMIT, CP_ASYNC_COMMIT) {
    FOR_LANES (lane, mask) (in.op == BULK_COMMIT ? w.bulk_stores : w.copies).commit(lane);
}

// aux: number of groups that may stay pending; .read waits for reads of their sources only.
INSTRUCTION(Status, wait, BULK_WAIT) {
    const size_t keep = (size_t)in.aux;
    const bool only_reads = in.flags & F_READ;
    FOR_LANES (lane, mask) {
        const auto& groups = w.bulk_stores.committed[lane];
        for (size_t i = 0; i + keep < groups.size(); i++)
            if (groups[i]->reads || (!only_reads && groups[i]->writes)) {
                w.waits_for = "cp.async.bulk.wait_group";
                return BLOCK;
            }
    }
    FOR_LANES (lane, mask) {
        auto& groups = w.bulk_stores.committed[lane];
        const size_t waited = groups.size() > keep ? groups.size() - keep : 0;
        if (races_on) {
            u32& known = w.clock[agent_of(w, STORE_AGENT)];
            for (size_t i = 0; i < waited; i++) known = std::max(known, groups[i]->clock);
        }
        // Groups that no instruction has waited for stay, even if they are complete.
        for (size_t i = 0; i < waited && !groups.front()->reads && !groups.front()->writes; i++)
            groups.pop_front();
    }
    return OK;
}
