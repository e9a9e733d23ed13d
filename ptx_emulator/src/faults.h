// Kernels that touch global memory which the process does not have.
#pragma once
// Runs the machine's launch. An access of a kernel to memory that is not mapped, or a store to
// memory that is read-only, ends it with an EmulatorError.
void launch_guarded();
