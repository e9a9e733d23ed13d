"""Output tokens per second of vLLM with its own experts, and with those of the plug-in.

    python -m perf.vllm stock grouped_nvfp4_row_scaled grouped_fp8_block --layers 12

The model has dummy weights and the width of Qwen3-30B-A3B. Each contender runs in processes of its
own: ``stock`` is vLLM in bf16, ``modelopt_nvfp4`` its own kernels for a ModelOpt checkpoint, and
other names are values of ``--quantization``, such as ``fp8_per_block`` of vLLM or a scheme of the
plug-in. A process serves each case once before it
measures, and reports the better of two runs. The table has medians over processes. ``--profile N``
prints instead the kernels that take the most time while N sequences decode.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

#: Fields of the configuration in which models differ.
MODELS: dict[str, dict[str, Any]] = {
    # To try this program on a CPU.
    "tiny": {
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_attention_heads": 4,
        "num_experts": 8,
    },
    "qwen3-30b-a3b": {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
    },
    "qwen3-235b-a22b": {
        "hidden_size": 4096,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
        "num_experts": 128,
    },
}
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
#: Contenders that are checkpoints of vLLM's own methods: the configuration of their quantization.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "modelopt_nvfp4": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head", "*self_attn*", "*mlp.gate"],
        "ignore": ["lm_head", "*self_attn*", "*mlp.gate"],
    },
}
#: Begins the line with the result of a process.
_RESULT = "RESULT "


class Case(NamedTuple):
    """A load: so many sequences at once.

    Attributes:
        sequences: Number of sequences.
        prompt: Tokens of each prompt.
        output: Tokens that each sequence generates.
    """

    sequences: int
    prompt: int
    output: int

    def __str__(self) -> str:
        return f"{self.sequences} x {self.prompt} + {self.output}"

    @property
    def tokens(self) -> int:
        """Number of tokens that a rate counts: generated ones, or all if few are generated."""
        return self.sequences * (self.output if self.output > 16 else self.prompt + self.output)


CASES = (
    Case(1, 32, 128),
    Case(8, 32, 128),
    Case(64, 32, 128),
    Case(256, 32, 128),
    Case(1024, 32, 64),
    Case(8, 1024, 8),
    Case(64, 1024, 8),
)


def write_config(folder: Path, model: str, layers: int, contender: str) -> None:
    """Write the configuration of a model that is cut to some layers."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "hidden_act": "silu",
        "head_dim": 128,
        "intermediate_size": 6144,
        "num_hidden_layers": layers,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "vocab_size": 65536,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **MODELS[model],
    }
    if contender in CHECKPOINTS:
        config["quantization_config"] = CHECKPOINTS[contender]
    (folder / "config.json").write_text(json.dumps(config))


def start(contender: str, options: argparse.Namespace, folder: Path) -> Any:
    """Start vLLM in this process."""
    os.environ |= _ENVIRONMENT
    from grouped.integrations.vllm import register

    register()
    from vllm import LLM

    write_config(folder, options.model, options.layers, contender)
    return LLM(
        model=str(folder),
        quantization=None if contender in {"stock", *CHECKPOINTS} else contender,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.85,
        enable_prefix_caching=False,
        enforce_eager=not torch.cuda.is_available(),
        tensor_parallel_size=options.tensor_parallel_size,
    )


def generate(llm: Any, case: Case) -> float:
    """Serve a case and return the seconds that it took."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 65000, (case.sequences, case.prompt), generator=generator).tolist()
    parameters = SamplingParams(
        max_tokens=case.output, ignore_eos=True, temperature=0, detokenize=False
    )
    started = time.perf_counter()
    llm.generate([{"prompt_token_ids": i} for i in ids], parameters, use_tqdm=False)
    return time.perf_counter() - started


def measure(contender: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the rates of a contender, its seconds until ready, and the kernels loaded later."""
    from cute_kernels.runtime import compile as compilation

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        llm = start(contender, options, Path(folder))
        ready = time.perf_counter() - started
        if options.profile:
            profile(llm, Case(options.profile, 32, 32))
            return {}
        loaded, rates = len(compilation._kernels), {}
        for case in selected_cases(options):
            generate(llm, case)
            rates[str(case)] = case.tokens / min(generate(llm, case) for _ in range(2))
        late = len(compilation._kernels) - loaded
    return {"rates": rates, "ready": ready, "late_kernels": late, "gpu": gpu_name()}


def profile(llm: Any, case: Case) -> None:
    """Print the kernels that take the most time in a case."""
    from torch.profiler import ProfilerActivity

    generate(llm, case)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        generate(llm, case)
    table = profiler.key_averages().table(
        sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=120
    )
    print(table, flush=True)


def gpu_name() -> str:
    """Return the name of the GPU, or ``"CPU"``."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def selected_cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield the cases to measure."""
    for case in CASES:
        if not options.sequences or case.sequences in options.sequences:
            yield case


def run_in_process(contender: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Measure a contender in a new process; None if it fails or prints a profile."""
    command = [sys.executable, "-m", "perf.vllm", contender, "--in-process"]
    for name in ("model", "layers", "tensor_parallel_size", "profile"):
        if (value := getattr(options, name)) is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    if options.sequences:
        command += ["--sequences", *map(str, options.sequences)]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = process.stdout.splitlines()
    results = [line.removeprefix(_RESULT) for line in lines if line.startswith(_RESULT)]
    if not results or options.profile:
        print(process.stdout, flush=True)
        return None
    result: dict[str, Any] = json.loads(results[-1])
    print(contender, json.dumps(result), flush=True)
    return result


def print_table(results: dict[str, list[dict[str, Any]]], cases: Sequence[Case]) -> None:
    """Print medians over processes, in tokens per second."""
    print("| sequences x prompt + output |", " | ".join(results), "|")
    print("|---|" + "--:|" * len(results))
    for case in cases:
        medians = (
            f"{statistics.median(r['rates'][str(case)] for r in runs):.0f}" if runs else "failed"
            for runs in results.values()
        )
        print(f"| {case} |", " | ".join(medians), "|")
    for contender, runs in results.items():
        if runs:
            ready = statistics.median(r["ready"] for r in runs)
            late = max(r["late_kernels"] for r in runs)
            print(f"{contender}: ready after {ready:.0f} s, {late} kernels loaded in requests")


def main() -> int:
    """Run the command line, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m perf.vllm", description=__doc__)
    parser.add_argument(
        "contenders", nargs="+", help="stock, modelopt_nvfp4, or values of --quantization"
    )
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--processes", type=int, default=1, help="processes of each contender")
    parser.add_argument("--sequences", type=int, nargs="*", help="only cases with these numbers")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--profile", type=int, metavar="N", help="profile N sequences instead")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_process:
        result = measure(options.contenders[0], options)
        print(_RESULT + json.dumps(result), flush=True)
        return 0
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in options.contenders}
    for _ in range(options.processes):
        for contender, runs in results.items():
            measured = run_in_process(contender, options)
            runs += [] if measured is None else [measured]
    if not options.profile:
        print_table(results, list(selected_cases(options)))
    return int(not options.profile and not all(results.values()))


if __name__ == "__main__":
    sys.exit(main())
