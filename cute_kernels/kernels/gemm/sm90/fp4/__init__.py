"""FP4 operands on sm_90a, whose tensor cores know none: as fp16 or bf16 values, exactly."""
