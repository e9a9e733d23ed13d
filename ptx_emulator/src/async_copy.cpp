// cp.async: copies that land some time after they were issued, in the order of each lane.
#include <cstring>

#include "memory.h"
#include "races.h"

// Operands: destination, source, size, [size of the source, or a predicate to ignore it].
INSTRUCTION(void, copy, CP_ASYNC) {
    FOR_LANES (lane, mask) {
        const u32 to = shared_address(w, in, 0, lane);
        const u64 from = address_of(w, in, 1, lane);
        const u32 bytes = (u32)value_of(w, in, 2, lane);
        u32 filled = bytes;
        if (in.num_operands > 3) {
            const u32 v = (u32)value_of(w, in, 3, lane);
            filled = !(in.flags & F_IGNORE) ? v : (v & 1) ^ operand(in, 3).negated ? 0 : bytes;
        }
        if (bytes != 4 && bytes != 8 && bytes != 16) fail("cp.async of %u bytes", bytes);
        if (filled > bytes) fail("cp.async reads %u bytes and writes %u", filled, bytes);
        if (to % bytes || from % bytes)
            fail("misaligned cp.async of %u bytes from %#llx to shared offset %u", bytes, from,
                 offset_of(to));
        u8* p = shared_pointer(w, to, bytes);
        if (filled) machine.check_range(from, filled, "cp.async");
        machine.stats.ld_global_bytes += filled;
        machine.stats.ld_global_sectors += (filled + 31) / 32;
        note_generic_write(w, lane, to, bytes);
        CopyGroupPtr group = w.copies.opened(lane);
        group->writes++;
        machine.post(
            [=] {
                if (filled) machine.check_range(from, filled, "cp.async");
                memcpy(p, (const void*)from, filled);
                memset(p + filled, 0, bytes - filled);
                group->writes--;
                machine.epoch++;
            },
            &w.copy_time[lane]);
    }
}

// aux: number of groups that may stay pending; -1 waits for everything, committed or not.
INSTRUCTION(Status, wait, CP_ASYNC_WAIT) {
    const bool all = in.aux < 0;
    const size_t keep = all ? 0 : (size_t)in.aux;
    FOR_LANES (lane, mask) {
        const auto& groups = w.copies.committed[lane];
        bool pending = all && w.copies.open[lane] && w.copies.open[lane]->writes;
        for (size_t i = 0; i + keep < groups.size(); i++) pending |= groups[i]->writes > 0;
        if (pending) {
            w.waits_for = "cp.async.wait_group";
            return BLOCK;
        }
    }
    FOR_LANES (lane, mask) {
        auto& groups = w.copies.committed[lane];
        while (!groups.empty() && !groups.front()->writes) groups.pop_front();
    }
    return OK;
}

// cp.async.mbarrier.arrive: arrives once the lane's earlier copies have landed.
INSTRUCTION(void, arrive, CP_ASYNC_MBAR) {
    const bool counted = in.sub;  // .noinc: init counted this arrival
    FOR_LANES (lane, mask) {
        const SharedPlace barrier = shared_place(w, in, 0, lane, 8);
        if (!counted) mbarrier_expect_arrival(barrier.owner, barrier.offset);
        const Actor me = races_on ? warp_actor(w) : Actor();
        machine.post(
            [=] {
                if (races_on)
                    race_join(barrier.owner->mbarrier_sync[barrier.offset].gathering, me.clock);
                mbarrier_arrive(barrier.owner, barrier.offset, 1);
            },
            &w.copy_time[lane]);
    }
    if (races_on) w.clock[agent_of(w, WARP_AGENT)]++;
}
