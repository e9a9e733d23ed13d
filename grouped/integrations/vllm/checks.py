"""Options of vLLM that the experts do not support: one error before any weight is loaded."""

from collections.abc import Iterator
from typing import Any

from ..serving.device import Choice
from ..serving.schemes import SCHEMES, LoadedFormat, load_format
from .symbols import envs

_OMIT = "omit --quantization to use vLLM's own kernels"


def make_choice(scheme_name: str) -> Choice:
    """Return a choice of a scheme in vLLM's words."""
    return Choice(
        f"--quantization {scheme_name}",
        _OMIT,
        "use a smaller --tensor-parallel-size, or --enable-expert-parallel",
    )


def check_options(moe: Any, vllm_config: Any, scheme_name: str, formats: LoadedFormat) -> None:
    """Raise ValueError for an option of vLLM that the experts do not support.

    Args:
        moe: vLLM's ``FusedMoEConfig`` of the layer.
        vllm_config: vLLM's configuration.
        scheme_name: Value of ``--quantization``.
        formats: Formats of the experts.
    """
    for is_wrong, option, reason, advice in _rules(moe, vllm_config, formats):
        if is_wrong:
            raise ValueError(f"{option} with --quantization {scheme_name}: {reason}: {advice}")


def _rules(
    moe: Any, vllm_config: Any, formats: LoadedFormat
) -> Iterator[tuple[bool, str, str, str]]:
    """Yield, for each rule: True if it is broken, the option, the reason and the advice."""
    parallel = moe.moe_parallel_config
    yield (
        moe.is_lora_enabled,
        "--enable-lora",
        "adapters of experts are not supported",
        f"serve merged weights, or {_OMIT}",
    )
    yield (
        parallel.use_all2all_kernels and parallel.all2all_backend != "allgather_reducescatter",
        f"--all2all-backend {parallel.all2all_backend}",
        "it hands tokens to experts in a layout of its own",
        "use --all2all-backend allgather_reducescatter",
    )
    yield (
        bool(getattr(vllm_config.model_config, "enable_sleep_mode", False)),
        "--enable-sleep-mode",
        "it discards memory that kernels keep",
        f"do without it, or {_OMIT}",
    )
    invariant = [
        name for name in SCHEMES if load_format(SCHEMES[name], None, False).is_batch_invariant
    ]
    yield (
        bool(envs.VLLM_BATCH_INVARIANT) and not formats.is_batch_invariant,
        "VLLM_BATCH_INVARIANT=1",
        f"tokens share a scale in {formats.recipe}",
        f"use one of {', '.join(invariant)}",
    )
