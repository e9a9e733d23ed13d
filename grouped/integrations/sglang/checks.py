"""Options of SGLang that the experts do not support: one error before any weight is loaded."""

from collections.abc import Iterator
from typing import Any

from ..serving.device import Choice
from ..serving.schemes import SCHEMES, LoadedFormat, load_format
from .symbols import get_exec, get_lora, get_model, get_moe_a2a_backend, get_parallel

_OPTION = "--moe-runner-backend"
_OMIT = f"omit {_OPTION} to use SGLang's own kernels"


def make_choice(scheme_name: str) -> Choice:
    """Return a choice of a scheme in SGLang's words."""
    return Choice(f"{_OPTION} {scheme_name}", _OMIT, "use a smaller --tp-size, or --ep-size")


def load_stored_format(scheme_name: str, layout_name: str | None, has_inputs: bool) -> LoadedFormat:
    """Return the formats of experts that a checkpoint stores in a layout.

    Raises:
        ValueError: The scheme has weights of another kind than the checkpoint.
    """
    return load_format(SCHEMES[scheme_name], layout_name, has_inputs, _OPTION)


def check_options(layer: Any, scheme_name: str, formats: LoadedFormat) -> None:
    """Raise ValueError for an option of SGLang that the experts do not support.

    Args:
        layer: SGLang's ``FusedMoE``.
        scheme_name: Value of ``--moe-runner-backend``.
        formats: Formats of the experts.
    """
    for is_wrong, option, reason, advice in (*_rules(formats), *_memory_rules()):
        if is_wrong:
            raise ValueError(f"{option} with {_OPTION} {scheme_name}: {reason}: {advice}")
    for is_wrong, fact in _layer_rules(layer):
        if is_wrong:
            raise ValueError(
                f"{_OPTION} {scheme_name} cannot serve {layer.layer_name}: {fact}: {_OMIT}"
            )


def _rules(formats: LoadedFormat) -> Iterator[tuple[bool, str, str, str]]:
    """Yield, for each rule: True if it is broken, the option, the reason and the advice."""
    lora, experts = get_lora(), get_exec().moe
    yield (
        bool(lora.enable_lora or lora.lora_paths),
        "--enable-lora",
        "adapters of experts are not supported",
        f"serve merged weights, or {_OMIT}",
    )
    yield (
        not get_moe_a2a_backend().is_none(),
        f"--moe-a2a-backend {get_moe_a2a_backend().value}",
        "it hands tokens to experts in a layout of its own",
        "use --moe-a2a-backend none",
    )
    yield (
        experts.kt_weight_path is not None,
        "--kt-weight-path",
        "experts on the CPU are not supported",
        _OMIT,
    )
    yield (
        bool(experts.enable_paged_experts),
        "--enable-paged-experts",
        "kernels keep the addresses of weights",
        _OMIT,
    )
    invariant = [
        name for name in SCHEMES if load_format(SCHEMES[name], None, False).is_batch_invariant
    ]
    yield (
        bool(get_exec().deterministic.enable_deterministic_inference)
        and not formats.is_batch_invariant,
        "--enable-deterministic-inference",
        f"tokens share a scale in {formats.recipe}",
        f"use one of {', '.join(invariant)}",
    )


def _memory_rules() -> Iterator[tuple[bool, str, str, str]]:
    """Yield rules on options that move or replace the memory of weights."""
    offload, model = get_exec().offload, get_model()
    for is_wrong, option in (
        (bool(get_exec().features.enable_memory_saver), "--enable-memory-saver"),
        (offload.cpu_offload_gb > 0, "--cpu-offload-gb"),
        (offload.offload_group_size > 0, "--offload-group-size"),
        (get_parallel().dwdp_size > 1, "--dwdp-size"),
        (model.weight_cache_mode != "off", "--weight-cache-mode"),
        (bool(model.is_startup_weight_load_overlap), "the overlap of loading and capture"),
    ):
        yield is_wrong, option, "kernels keep the addresses of weights", f"do without, or {_OMIT}"


def _layer_rules(layer: Any) -> Iterator[tuple[bool, str]]:
    """Yield, for each rule on a layer: True if it is broken, and the fact."""
    config = layer.moe_runner_config
    yield bool(layer.with_bias), "its experts have biases"
    yield bool(layer.is_shared_fused_moe), "it holds shared experts, which other kernels call"
    yield bool(config.no_combine), "its output is one row for each expert of a token"
    yield bool(config.silu_mul_keep_fp32), "it keeps the activation in fp32"
