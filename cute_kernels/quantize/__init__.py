"""Quantization kernels: configurations here, kernels in modules that need the DSL."""

from .config import (
	AmaxConfig,
	DbiasConfig,
	DelayedConfig,
	DequantizeConfig,
	OffsetsConfig,
	Prologue,
	QuantizeProblem,
	RowsConfig,
	TileConfig,
	TokensConfig,
	TokenValuesConfig,
	ValuesConfig,
)

__all__ = [
	"AmaxConfig",
	"DbiasConfig",
	"DelayedConfig",
	"DequantizeConfig",
	"OffsetsConfig",
	"Prologue",
	"QuantizeProblem",
	"RowsConfig",
	"TileConfig",
	"TokenValuesConfig",
	"TokensConfig",
	"ValuesConfig",
]
