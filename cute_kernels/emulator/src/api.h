// What the CUDA runtime entry points need of the machine.
#pragma once
#include <cstdint>

constexpr int EMULATOR_FAILURE = 719;  // cudaErrorLaunchFailure

extern "C" {
int emu_launch(const char* key, const uint32_t* grid, const uint32_t* block,
               const uint32_t* cluster, int explicit_cluster, uint32_t dynamic_smem, void** args);
const char* emu_tensor_map_encode(void* out, int type, uint32_t rank, uint64_t address,
                                  const uint64_t* dims, const uint64_t* strides,
                                  const uint32_t* box, const uint32_t* element_strides,
                                  int interleave, int swizzle, int fill);
void emu_set_error(const char* text);
const char* emu_last_error();
}
