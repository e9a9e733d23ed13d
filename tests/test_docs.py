"""Every block of Python in the README and in docs/ runs, and says what is true."""

import re
from pathlib import Path

import pytest
import torch

import cute_kernels
import grouped
from tests.helpers import assert_same_bytes, has_compiler

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
PAGES = {page: blocks for page, blocks in PAGES.items() if blocks}
#: Replacements that make examples smaller.
INSTEAD = {"README.md": {"4096": "64", "1024": "48"}}
EAGER = {"moe, fullgraph=True": "moe, fullgraph=True, backend='eager'"}
#: Libraries that a page needs.
LIBRARIES = {
    "transformers": "transformers",
    "torchtitan": "torchtitan.models.common.moe",
    "checkpoints": "safetensors",
}
#: Code that runs before the first block.
GIVEN = {
    "docs/moe.md": """
import torch, grouped
expert_ids, weights, num_experts = torch.randint(4, (20, 2)), torch.rand(20, 2), 4
x, mlp = torch.randn(20, 64).bfloat16(), grouped.nn.GroupedMLP(4, 64, 32, dtype=torch.bfloat16)
w, offs, out_dtype = torch.randn(4, 64, 64).bfloat16(), torch.tensor([5, 5, 9, 20]).int(), torch.bfloat16
bias = alpha = x_scales = w_scales = x_format = w_format = accumulation = None
prepacked = interleaved = False
""",  # noqa: E501
    "docs/groups.md": "import torch, grouped",
    "docs/distributed.md": """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
device, ranks = "cpu", 1
""",
    "README.md": "import cute_kernels",
}


def readme(x, w, offs, xq, wq, layer, y, moe, losses, **_):
    """Check the results of the README's examples."""
    assert (
        y.shape == (64, 48)
        and losses.tokens_per_expert.sum() == 64 * 4
        and moe.router.selection_bias.any()
    )
    assert all(p.grad is not None for p in moe.parameters())
    compiled = layer.weight.grad.clone()
    assert not compiled[2].any() and compiled[3].any()
    layer.zero_grad()
    layer(x, offs).sum().backward()
    assert_same_bytes(layer.weight.grad, compiled)
    got = grouped.grouped_gemm(xq, wq).float()
    for g, (start, end) in enumerate(((0, 80), (80, 128), (128, 128), (128, 256))):
        want = x[start:end].float() @ w[g].float().T
        assert (got[start:end] - want).norm() <= 0.2 * want.norm()


def groups(q, shapes, **names):
    assert q.element_offsets[-1] == sum(m * n for m, n in shapes) == 29_696
    assert q.member(1).codes.shape == (1, 2048)
    assert not q.dequantize()[29_696:].any()


def distributed(dist, quantized, local, y, moe, **_):
    dist.destroy_process_group()
    assert (
        type(local) is grouped.GroupedTensor
        and torch.equal(local, quantized)
        and y.shape == (20, 32)
    )
    assert moe.experts.down.weight.grad is not None and moe.exchange.sent["dispatch"] == 0


CHECKS = {"docs/distributed.md": distributed, "README.md": readme, "docs/groups.md": groups}


def smaller(page, code):
    for large, small in (EAGER | INSTEAD.get(page, {})).items():
        code = code.replace(large, small)
    return code


@pytest.mark.parametrize("page", [*PAGES])
def test_blocks_run(page, tmp_path, monkeypatch):
    """Run the code blocks of each page."""
    if Path(page).stem in LIBRARIES:
        pytest.importorskip(LIBRARIES[Path(page).stem], exc_type=ImportError)
    if page == "README.md" and not has_compiler():
        pytest.skip("Inductor needs a C++ compiler")
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    names = {}
    exec(GIVEN.get(page, ""), names)
    for code in PAGES[page]:
        if "emulated:" not in code:
            exec(compile(smaller(page, code), page, "exec"), names)
    CHECKS.get(page, lambda **names: None)(**names)


@pytest.mark.emulated
def test_the_emulated_example_gives_the_bits_of_a_tensor_core():
    """Compare the emulated example with the reference of its tensor core."""
    names = {"cute_kernels": cute_kernels}
    first_block, *_, emulated = PAGES["README.md"]
    exec(smaller("README.md", first_block.split("layer =")[0] + emulated), names)
    with cute_kernels.backend("reference:sm_100a"):
        want = grouped.grouped_gemm(names["xq"], names["wq"])
    assert_same_bytes(names["y"], want)
    assert cute_kernels.emulator.stats()["mma_flops"] > 0


def test_extras_that_are_named_exist():
    """Check that the extras that docs and messages name exist."""
    folders = [
        path
        for top in ("cute_kernels", "grouped", "docs")
        for path in (ROOT / top).rglob("*.[pm][yd]")
    ]
    text = "".join(path.read_text() for path in (ROOT / "README.md", *folders))
    named = set(re.findall(r"(?:grouped-kernels|\.)\[(\w+)\]'", text))
    assert named >= {"cutedsl", "demo"}
    toml = pytest.importorskip("tomllib")
    assert (
        named
        <= toml.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ].keys()
    )


def test_tests_that_are_named_exist():
    """Check that the tests that docs name exist."""
    text = (ROOT / "docs" / "pytorch.md").read_text()
    files, checks = (
        re.findall(r"`(?:tests/(integration)/)?(test_\w+)`", text),
        re.findall(r" \*(\w+)\*", text),
    )
    assert len(files) > 15
    assert all(
        (ROOT / "tests" / (folder or "grouped") / f"{name}.py").exists() for folder, name in files
    )
    modules = (ROOT / "tests" / "grouped" / "two_ranks").glob("*.py")
    two_ranks = "".join(path.read_text() for path in modules)
    assert len(checks) > 15
    assert not [name for name in checks if f"@check\ndef {name}(" not in two_ranks]


def test_every_page_is_named_in_the_readme():
    text = (ROOT / "README.md").read_text()
    assert not [
        path.name for path in (ROOT / "docs").glob("*.md") if f"(docs/{path.name})" not in text
    ]
