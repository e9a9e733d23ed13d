// The machine's interface for the CUDA runtime entry points.
#pragma once
#include <cstdint>

constexpr int EMULATOR_FAILURE = 719;  // cudaErrorLaunchFailure

extern "C" {
int emu_launch(const char* key, const uint32_t* grid, const uint32_t* block,
               const uint32_t* cluster, int explicit_cluster, uint32_t dynamic_smem, void** args);
const char* emu_last_error();
}
