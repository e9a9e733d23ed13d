// The dispatch of memory instructions.
#include "memory.h"

Status execute_memory(Warp& w, const Instruction& in, u32 mask) {
	switch (in.op) {
		case LD:
		case ST: load_store(w, in, mask); return OK;
		case ATOM:
		case RED: atomics(w, in, mask); return OK;
		case LDMATRIX:
		case STMATRIX: return matrix_load_store(w, in, mask);
		case FENCE_PROXY_ASYNC: proxy_fence(w, mask); return OK;
		case TMAP_ADDRESS: tensor_map_address(w, in, mask); return OK;
	}
	if (in.op >= MBAR_INIT && in.op <= MBAR_WAIT) return execute_mbarrier(w, in, mask);
	if (in.op >= CP_ASYNC && in.op <= CP_ASYNC_MBAR) return execute_copy(w, in, mask);
	return execute_bulk_copy(w, in, mask);
}
