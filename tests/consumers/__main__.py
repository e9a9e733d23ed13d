"""Write folders and ask readers about them: ``python -m tests.consumers READER=VERSION=ROOT ...``.

Exits 1 if an answer is not what was written.
"""

import json
import shutil
import sys
import tempfile
import warnings
from importlib import metadata
from pathlib import Path

import torch

from grouped import checkpoint
from grouped.checkpoint import convert
from grouped.integrations.transformers import register

from . import readers

READERS = {"vllm": readers.vllm, "sglang": readers.sglang}
#: By layout: the block, and whether weights alone are quantized, without and with input scales.
WANTED = {
    "modelopt": (16, True, False),
    "compressed-tensors": (16, True, False),
    "deepseek": ([128, 128], None, None),
}


def write(root: Path) -> dict[Path, tuple[object, bool | None]]:
    """Folders of a small Qwen3-MoE by ``save`` and ``convert``, with what readers should find
    there.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    register()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=128,
        moe_intermediate_size=128,
        intermediate_size=128,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=64,
        experts_implementation="grouped_bf16",
    )
    model, source, ids = Qwen3MoeForCausalLM(config).bfloat16(), root / "source", root / "ids.json"
    model.save_pretrained(source)
    ids.write_text(json.dumps(torch.randint(0, 64, (4, 32)).tolist()))
    folders = dict[Path, tuple[object, bool | None]]()
    for layout, (block, weights_alone, with_inputs) in WANTED.items():
        folders[root / f"save {layout}"] = (block, weights_alone)
        checkpoint.save(model, root / f"save {layout}", layout)
        folders[root / f"convert {layout}"] = (block, weights_alone)
        convert.convert(source, root / f"convert {layout}", layout=layout)
        if with_inputs is not None:
            folders[root / f"calibrate {layout}"] = (block, with_inputs)
            convert.convert(source, root / f"calibrate {layout}", layout=layout, calibrate=ids)
    return folders


def without_ignored(folder: Path) -> Path:
    """A copy of a folder that names no plain modules: readers must take them for quantized, else
    they were not asked.
    """
    copy = folder.with_name(f"{folder.name}, ignoring nothing")
    copy.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {
        key: []
        for key in ("ignore", "ignored_layers", "modules_to_not_convert")
        if key in config["quantization_config"]
    }
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def ask(name: str, root: str, folder: Path) -> readers.Answer:
    """The answer of a reader; what it raises stands for the class of experts."""
    try:
        return READERS[name](Path(root), [folder])[0]
    except Exception as error:
        return readers.Answer("", f"{type(error).__name__}: {error}", None, None, ["all"])


def main(arguments: list[str]) -> int:
    """Print a table of answers; returns how many are wrong."""
    root = Path(tempfile.mkdtemp())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            folders = write(root)
        print(f"{'reader':15} {'folder':30} {'experts':38} {'weights alone':14} block")
        wrong = 0
        for argument in arguments:
            name, version, position = argument.split("=", 2)
            if name == "modelopt":
                same = readers.modelopt(
                    Path(position), [folder for folder in folders if "modelopt" in folder.name]
                )
                print(
                    f"{name} {version}: it makes config.json of hf_quant_config.json as written: {all(same)}"  # noqa: E501
                )
                wrong += not all(same)
                continue
            for folder, wanted in folders.items():
                answer = ask(name, position, folder)
                right = (answer.block, answer.weight_only, answer.quantized) == (
                    *wanted,
                    [],
                ) and "Unquantized" not in answer.experts
                note = "" if right else f"  WRONG: wanted {wanted}, {answer}"
                print(
                    f"{name:6} {version:8} {folder.name:30} {answer.experts:38} {answer.weight_only!s:14} {answer.block}{note}"  # noqa: E501
                )
                wrong += not right
            for folder in [f for f in folders if f.name.startswith("convert")]:
                if not ask(name, position, without_ignored(folder)).quantized:
                    print(
                        f"{name} {version} {folder.name}: WRONG: it asks nothing of modules that are not quantized"  # noqa: E501
                    )
                    wrong += 1
                shutil.rmtree(folder.with_name(f"{folder.name}, ignoring nothing"))
        versions = ", ".join(
            f"{p} {metadata.version(p)}" for p in ("torch", "transformers", "compressed-tensors")
        )
        print(
            f"{'all answers are right' if not wrong else f'{wrong} answers are wrong'} ({versions})"
        )
        return int(bool(wrong))
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
