"""Compare vLLM under the plug-in with transformers: ``python -m tests.serving [CASE ...]``.

Experts must have the bits of transformers' experts for the tokens that vLLM gave them. The
log-probabilities of whole models differ, since attention in bf16 differs: by about 1%, and by more
where activations are quantized, since a small difference changes codes. Exits 1 otherwise.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

from grouped.integrations.vllm import SCHEMES, Scheme  # noqa: E402
from grouped.integrations.vllm.method import GroupedExpertsMethod  # noqa: E402
from tests.serving import folders  # noqa: E402

LAYOUTS = ("modelopt", "compressed-tensors", "deepseek")


class Case(NamedTuple):
    """A checkpoint that is served.

    Attributes:
        folder: Name of the checkpoint.
        scheme: Value of ``--quantization``.
        implementation: Implementation of transformers' experts with the same formats.
    """

    folder: str
    scheme: str
    implementation: str

    def __str__(self) -> str:
        return f"{self.folder} / {self.scheme}"


def _implementation(scheme: Scheme) -> str:
    """Name of transformers' implementation with the recipe of a scheme."""
    recipes = folders.integration.RECIPES
    return next(name for name, recipe in recipes.items() if recipe == scheme.recipe)


def cases() -> list[Case]:
    """All cases: each scheme on a plain folder, and folders with quantized experts."""
    folders.integration.register()
    plain = [Case("plain", "grouped", "eager"), Case("plain", "grouped", "grouped_bf16")]
    plain += [
        Case("plain", scheme.name, _implementation(scheme))
        for scheme in SCHEMES.values()
        if scheme.recipe is not None
    ]
    return [
        *plain,
        Case("modelopt", "grouped", "grouped_bf16"),
        Case("modelopt", "grouped_nvfp4_row_scaled", "grouped_nvfp4_row_scaled"),
        Case("modelopt, calibrated", "grouped", "grouped_nvfp4_row_scaled"),
        Case("modelopt, calibrated", "grouped_w4a16", "grouped_bf16"),
        Case("compressed-tensors", "grouped", "grouped_bf16"),
        Case("compressed-tensors, calibrated", "grouped", "grouped_nvfp4_row_scaled"),
        Case("deepseek", "grouped", "grouped_fp8_block"),
        Case("deepseek", "grouped_w8a16", "grouped_bf16"),
        Case("fp8-block", "grouped", "grouped_fp8_block"),
    ]


def served(folder: Path, scheme: str | None, **options: Any) -> Tensor:
    """Log-probabilities of the prompts as vLLM computes them, as ``folders.logits`` orders them."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        model=str(folder),
        quantization=scheme,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=128,
        max_num_seqs=8,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_logprobs=folders.VOCABULARY,
        **options,
    )
    parameters = SamplingParams(
        max_tokens=1, temperature=0, prompt_logprobs=folders.VOCABULARY, detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in folders.prompts()]
    rows = [
        [position[token].logprob for token in range(folders.VOCABULARY)]
        for output in llm.generate(prompts, parameters, use_tqdm=False)
        for position in output.prompt_logprobs[1:]
    ]
    del llm
    cleanup_dist_env_and_memory()
    return torch.tensor(rows)


class Recorder:
    """Records the calls of experts in its block: the layer's name, arguments and result."""

    def __enter__(self) -> "Recorder":
        self.calls: list[tuple[str, Tensor, Tensor, Tensor, Tensor]] = []
        self._apply = GroupedExpertsMethod.apply
        recorder = self

        def apply(method: Any, **arguments: Any) -> Tensor:
            """Record the call."""
            inputs = [arguments[name].clone() for name in ("x", "topk_weights", "topk_ids")]
            y = recorder._apply(method, **arguments)
            recorder.calls.append((arguments["layer"].layer_name, *inputs, y.clone()))
            return y

        GroupedExpertsMethod.apply = apply
        return self

    def __exit__(self, *_: object) -> None:
        GroupedExpertsMethod.apply = self._apply

    def count_different(self, model: Any, largest: float = 0) -> int:
        """Number of calls whose result is not that of transformers' experts.

        Args:
            model: The model of transformers.
            largest: Largest difference in norm, relative to the norm. 0 compares bits.
        """
        different = 0
        for name, x, weights, ids, y in self.calls:
            experts = model.get_submodule(name.replace("block_sparse_moe", "mlp"))
            with torch.no_grad():
                want = experts(x, ids.long(), weights)
            error = (y.float() - want.float()).norm() / want.float().norm()
            different += not (torch.equal(y, want) if largest == 0 else error < largest)
        return different


def difference(a: Tensor, b: Tensor) -> float:
    """Median over tokens of the difference in norm, relative to the norm around the mean."""
    a, b = (t - t.mean(-1, keepdim=True) for t in (a, b))
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).median())


def main(patterns: list[str]) -> int:
    """Serve all cases whose names contain a pattern, and return the exit status."""
    failures = 0
    with tempfile.TemporaryDirectory() as root:
        written = folders.write(Path(root), LAYOUTS)
        stock = served(written["plain"], None)
        for case in cases():
            if patterns and not any(pattern in str(case) for pattern in patterns):
                continue
            model = folders.load(
                written[case.folder], case.implementation, SCHEMES[case.scheme].weight
            )
            want = folders.logits(model)
            with Recorder() as recorder:
                got = served(written[case.folder], case.scheme)
            error, distance = difference(got, want), difference(got, stock)
            different = recorder.count_different(model)
            has_plain_activations = case.implementation in ("eager", "grouped_bf16")
            is_wrong = not error < (0.02 if has_plain_activations else 0.2)
            is_wrong |= not recorder.calls or bool(different) and case.implementation != "eager"
            failures += is_wrong
            print(
                f"{'WRONG' if is_wrong else 'right'}  {error:.4f} from transformers' "
                f"{case.implementation}, {distance:.4f} from vLLM in bf16, {different} of "
                f"{len(recorder.calls)} calls of experts with other bits: {case}",
                flush=True,
            )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
