"""Additional tensors of exporters, by name: harmless ones, and those that change results."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

#: Suffixes of tensors that do not change results with plain activations: scales of a quantized KV
#: cache and of quantized attention (ModelOpt, compressed-tensors, TensorRT-LLM), tables of rotary
#: embeddings, and position ids.
_HARMLESS = (
    r"(q|k|v|kv|prob|kv_cache|k_cache|v_cache|prob_output|softmax)_(global_)?(scale|zero_point|scaling_factor)",
    r"(k|v|kv|qkv|query_key_value|kv_b|kv_a)_proj(_with_mqa)?\.output_(global_)?(scale|zero_point)",
    r"[kv]_proj\.[kv]_bias",
    r"(original_)?inv_freq",
    r"rotary_emb\.(cos|sin)_cached",
    r"position_ids",
)
_HARMLESS_END = re.compile(rf"(^|.*[._])({'|'.join(_HARMLESS)})")
#: Names of multi-token prediction layers.
_MTP = re.compile(r"(^|.*\.)mtp(_\w+)?\..*")
#: Names that only multi-token prediction layers have. They identify such a layer if it is numbered
#: like the others, as DeepSeek-V3's model.layers.61.
_MTP_LAYER = re.compile(r"(?P<layer>(.*\.)?layers\.\d+)\.(eh_proj|enorm|hnorm|shared_head)\..*")

#: Suffixes of tensors that change results, and the neutral value that does not (None: there is
#: none). These are smoothing factors of activations (AWQ, SmoothQuant), low-rank terms (SVDQuant),
#: zero points (msModelSlim: offsets), permutations of columns and rotations.
_CHANGING = {
    r"pre_?quant_(scale|scaling_factor)": 1,
    r"(smooth(quant|ing)?|awq)_(scale|factor)s?": 1,
    r"(weight|input)_(zero_point|offset)": 0,
    r"svdquant_lora_[ab]": None,
    r"(weight_)?g_idx": None,
    r"[\w-]+_(input|output|weight_input|weight_output|q_attn|k_cache)\.(weight|perm)": None,
}
_CHANGING_ENDS = [
    (re.compile(rf"(?P<base>.+?)[._]{end}"), neutral) for end, neutral in _CHANGING.items()
]


def find_harmless(
    names: Iterable[str], used: Iterable[str], patterns: Iterable[str] = ()
) -> list[str]:
    """Return the names of tensors that do not change results.

    Args:
        names: Names in a checkpoint that no parameter of the module uses.
        used: Names that are used.
        patterns: Regular expressions of further harmless names, as in
            ``_keys_to_ignore_on_load_unexpected`` of transformers. They match anywhere in a name.
    """
    names, more_patterns = list(names), [re.compile(pattern) for pattern in patterns]
    layers = {f"{match['layer']}." for name in names if (match := _MTP_LAYER.fullmatch(name))}
    in_use = _Prefixes(used)
    layers = {layer for layer in layers if not in_use.has(layer)}

    def is_harmless(name: str) -> bool:
        match = re.match(r"(.*\.)?layers\.\d+\.", name)
        if (match is not None and match[0] in layers) or any(
            pattern.search(name) for pattern in more_patterns
        ):
            return True
        return bool(_HARMLESS_END.fullmatch(name) or _MTP.fullmatch(name))

    return [name for name in names if is_harmless(name)]


def find_result_changing(
    names: Iterable[str], used: Iterable[str], read: Callable[[str], Tensor]
) -> tuple[list[str], list[str]]:
    """Return the additional tensors of used weights that change results, and the neutral ones.

    Args:
        names: Names in a checkpoint that no parameter of the module uses.
        used: Names that are used.
        read: Returns the tensor of a name.
    """
    in_use, change, neutral = _Prefixes(used), list[str](), list[str]()
    for name in names:
        for pattern, value in _CHANGING_ENDS:
            match = pattern.fullmatch(name)
            if match is None or not in_use.has_weight(match["base"]):
                continue
            is_neutral = value is not None and bool((read(name).double() == value).all())
            (neutral if is_neutral else change).append(name)
            break
    return change, neutral


class _Prefixes:
    """A sorted set of names, for tests of prefixes."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names: Sequence[str] = sorted(names)
        self._whole = set(self._names)

    def has_weight(self, base: str) -> bool:
        """Return True if the names have a weight ``base``, of one expert or of all."""
        return (
            base in self._whole
            or self.has(f"{base}.weight")
            or self.has(f"{base}_weight")
            or self.has(f"{base}_blocks")
        )

    def has(self, prefix: str) -> bool:
        """Return True if a name starts with ``prefix``."""
        index = bisect_left(self._names, prefix)
        return index < len(self._names) and self._names[index].startswith(prefix)
