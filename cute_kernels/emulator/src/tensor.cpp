// The dispatch of tensor instructions, and tcgen05.commit.
#include "tensor.h"

#include "memory.h"
#include "races.h"

// Arrives on an mbarrier once all earlier tensor-core work of this CTA is done.
static void commit(Warp& w, const Instruction& in, u32 mask) {
	Cluster* cluster = w.cta->cluster;
	FOR_LANES (lane, mask) {
		const u32 address = shared_address(address_of(w, operand(in, 0), lane));
		const u32 offset = offset_of(address);
		const u32 ranks =
				(in.flags & F_MULTICAST) ? (u32)value_of(w, operand(in, 1), lane) & 0xffff : 1u << rank_of(address);
		if (!ranks || ranks >> cluster->ctas.size())
			fail("tcgen05.commit to CTA mask %#x of a cluster of %zu", ranks, cluster->ctas.size());
		const Actor me = issue_tensor(w);
		machine.post(
				[=] {
					FOR_LANES (rank, ranks) {
						CTA* c = cluster->ctas[rank].get();
						if (races_on) race_join(c->mbarrier_sync[offset].gathering, me.clock);
						mbarrier_arrive(c, offset, 1);
					}
				},
				&w.cta->tensor_core_time);
	}
}

Status execute_tensor(Warp& w, const Instruction& in, u32 mask) {
	switch (in.op) {
		case WGMMA:
		case WGMMA_FENCE:
		case WGMMA_COMMIT:
		case WGMMA_WAIT: return execute_wgmma(w, in, mask);
		case TC_ALLOC: return tmem_allocate(w, in, mask);
		case TC_DEALLOC: return tmem_deallocate(w, in, mask);
		case TC_RELINQUISH: w.cta->tmem_permit_given_up = true; return OK;
		case TC_LD:
		case TC_ST: return tmem_load_store(w, in, mask);
		case TC_WAIT:
			if (!(in.flags & F_LOAD)) tmem_wait_stores(w);
			return OK;
		case TC_FENCE: return OK;
		case TC_CP: tmem_copy(w, in, mask); return OK;
		case TC_MMA: tensor_mma(w, in, mask); return OK;
		case TC_COMMIT: commit(w, in, mask); return OK;
	}
	fail("instruction class %d is not a tensor instruction", in.op);
}
