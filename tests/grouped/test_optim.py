import copy
import pickle

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import grouped
from cute_kernels import backend
from cute_kernels.reference.adamw import adamw
from grouped import optim
from tests.helpers import BF16, F32, U8, each, each_arch, raises, seeded

FORMATS = [
    grouped.NVFP4(),
    grouped.NVFP4(block=(16, 16)),
    grouped.MXFP8(),
    grouped.FP8Block(block=(128, 128)),
    grouped.FP8(),
]
SHAPE = (3, 80, 64)


def draw(seed, *shape):
    return torch.randn(*(shape or SHAPE), generator=seeded(seed))


def same_bytes(p, q):
    return all(
        torch.equal(a.view(U8), b.view(U8))
        for a, b in zip(p._inner().values(), q._inner().values(), strict=True)
    )


def both(fmt=FORMATS[0], dtype=BF16, **options):
    w = draw(0)
    p = nn.Parameter(grouped.quantize(w.to(dtype), fmt, columnwise=True))
    master = w.clone().requires_grad_()
    return (
        p,
        optim.AdamW([p], masters={p: w}, **options),
        master,
        torch.optim.AdamW([master], fused=True, **options),
    )


def step(p, ours, master, theirs, seed, factor=1.0):
    grad = (draw(seed) * factor).to(p.dtype)
    p.grad, master.grad = grad, grad.float()
    ours.step()
    theirs.step()


def quantized_like(p, master):
    q = grouped.quantize(master.detach(), p.format, columnwise=True)
    assert q.shape == p.shape
    return q


@each("fmt", FORMATS, str)
@each("options", [{}, {"amsgrad": True, "maximize": True, "weight_decay": 0.3}], ["", "amsgrad"])
def test_bytes_are_those_of_torch_then_quantize(fmt, options):
    pair = both(fmt, lr=3e-2, **options)
    p, _, master, _ = pair
    for seed in range(1, 4):
        step(*pair, seed)
        assert same_bytes(p, quantized_like(p, master))
    assert torch.equal(pair[1].state[p]["master"], master) and p.dtype == BF16


@each_arch
@each(
    "fmt", [*FORMATS, grouped.FP8(scaling="delayed"), grouped.NVFP4(stochastic_rounding=True)], str
)
def test_kernels_have_the_bits_of_torchs_cuda_kernel_then_quantize(fmt, arch):
    """That one's arithmetic is the reference's, not that on CPUs;

    GradScaler skips the second step.
    """
    w, options = draw(0), {"scale": torch.ones(3)} if fmt.has_given_scale else {}
    p = nn.Parameter(grouped.quantize(w.bfloat16(), fmt, columnwise=True, **options))
    p = nn.Parameter(p.detach().prepack()) if fmt == FORMATS[0] else p
    constants = {"betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.3}
    ours = optim.AdamW([p], masters={p: w}, lr=torch.tensor(3e-2), maximize=True, **constants)
    if fmt == FORMATS[3]:
        ours.step = torch.compile(ours.step, backend="eager")
    held, scaler = [w.clone(), *torch.zeros(2, *SHAPE)], torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    for count, seed in ((1, 1), (1, None), (2, 2)):
        p.grad = torch.full(SHAPE, torch.inf).bfloat16() if seed is None else draw(seed).bfloat16()
        numbers = torch.tensor([3e-2, 0.8, 0.99, -scaler.get_scale(), seed is None])
        numbers[1:3] **= count
        adamw(held, p.grad, numbers, (0.8, 0.99, 1e-6, 0.3))
        if count == 2:
            p.main_grad, p.grad, p.grad_added_to_main_grad = (
                p.grad.float(),
                torch.zeros_like(p.grad),
                True,
            )
        version = p._version
        torch.manual_seed(7)
        with backend(f"emulated:{arch}"):
            scaler.step(ours)
        scaler.update()
        torch.manual_seed(7)
        q = grouped.quantize(held[0], fmt, columnwise=True, **options)
        assert same_bytes(p, q.prepack() if p.prepacked else q) and p._version > version
        state = ours.state[p]
        assert state["step"] == count and all(
            map(torch.equal, [state[n] for n in ("master", *optim._MOMENTS[:2])], held)
        )


def test_on_a_gpu_that_is_not_there():
    with FakeTensorMode():
        p = nn.Parameter(grouped.quantize(torch.zeros(SHAPE, device="cuda"), FORMATS[2]))
        p.grad = torch.zeros_like(p, dtype=F32)
        optim.AdamW([p]).step()


def test_what_has_no_kernel_is_torchs():
    w, fmt = draw(0), {"fmt": grouped.NVFP4(row_scaled=True)}
    for given, options in (
        (w, {}),
        (w[0], {"offs": [80]}),
        (w.view(-1), {"shapes": [(80, 64)] * 3}),
        (w, fmt),
    ):
        p = nn.Parameter(grouped.quantize(given, **{"fmt": FORMATS[0]} | options))
        master, amsgrad = p.detach().dequantize().requires_grad_(), not options
        ours, theirs = (
            optim.AdamW([p], amsgrad=amsgrad),
            torch.optim.AdamW([master], fused=True, amsgrad=amsgrad),
        )
        p.grad = master.grad = draw(1, *given.shape)
        with backend("emulated:sm_90a"):
            ours.step(), theirs.step()
        assert torch.equal(ours.state[p]["master"], master)


def test_a_master_by_default_and_the_version():
    w = draw(0).bfloat16()
    p = nn.Parameter(grouped.quantize(w, grouped.NVFP4()))
    plain = nn.Parameter(w.clone())
    unused = nn.Parameter(w.clone())
    ours = optim.AdamW(
        [{"params": [p]}, {"params": [plain, unused], "lr": 0.0}], lr=1e-3, master_weights=True
    )
    start, version = p.dequantize(F32), p._version
    p.grad, plain.grad = torch.zeros_like(plain), torch.ones_like(plain)
    assert ours.step(lambda: 7) == 7
    assert torch.equal(ours.state[p]["master"], start * (1 - 1e-3 * 1e-2)) and p._version > version
    assert (
        torch.equal(plain, w)
        and ours.state[plain]["master"].dtype == F32
        and not ours.state[unused]
    )


def test_plain_parameters_without_masters_are_torchs():
    a, b = (nn.Parameter(draw(1).bfloat16()) for _ in range(2))
    ours, theirs = optim.AdamW([a], lr=1e-2), torch.optim.AdamW([b], lr=1e-2, fused=True)
    for seed in range(2):
        a.grad = b.grad = draw(seed).bfloat16()
        ours.step(), theirs.step()
    assert torch.equal(a, b) and ours.state[a]["exp_avg"].dtype == BF16


def test_state_dict_keeps_fp32():
    pair = both()
    step(*pair, 1)
    p, ours, *_ = pair
    q = nn.Parameter(grouped.quantize(draw(5).bfloat16(), p.format, columnwise=True))
    other = optim.AdamW([q])
    other.load_state_dict(ours.state_dict())
    with torch.no_grad():
        q.copy_(p)
    assert {n: t.dtype for n, t in other.state[q].items()} == dict.fromkeys(ours.state[p], F32)
    step(*pair, 2)
    q.grad = p.grad
    other.step()
    assert same_bytes(p, q) and torch.equal(other.state[q]["master"], ours.state[p]["master"])
    assert other.state[q]["master"] is not ours.state[p]["master"]


def test_copies_and_states_of_torch():
    """A copy has all options; torch's moments become fp32, and a master that was given stays."""
    w = draw(0).bfloat16()
    theirs, p, plain = (
        nn.Parameter(w.clone()),
        nn.Parameter(grouped.quantize(w, FORMATS[0])),
        nn.Parameter(w.clone()),
    )
    torchs = torch.optim.AdamW([theirs])
    theirs.grad = draw(1).bfloat16()
    torchs.step()
    for q in (p, plain):
        ours = optim.AdamW([q], masters={q: w}, master_weights=True)
        ours.load_state_dict(torchs.state_dict())
        assert (
            torch.equal(ours.state[q]["master"], w.float())
            and ours.state[q]["exp_avg"].dtype == F32
        )
        copied = copy.deepcopy(ours)
        (other,) = copied.param_groups[0]["params"]
        q.grad = other.grad = draw(2).bfloat16()
        ours.step(), copied.step()
        assert torch.equal(ours.state[q]["master"], copied.state[other]["master"])
    without = optim.AdamW([plain])
    without.load_state_dict(ours.state_dict())
    without.param_groups[0]["amsgrad"] = True
    without.step()
    found = without.state[plain]
    assert found.keys() == {"step", *optim._MOMENTS} and found["exp_avg"].dtype == BF16


def loaded(optimizer):
    optimizer.load_state_dict(optimizer.state_dict())
    return optimizer


RESUMED = {
    "load_state_dict": loaded,
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "all": lambda optimizer: copy.deepcopy(loaded(pickle.loads(pickle.dumps(optimizer)))),
}


@each("resumed", RESUMED)
def test_parameters_unfrozen_after_a_resume(resumed):
    first, frozen = (
        nn.Parameter(grouped.quantize(draw(s), FORMATS[0], columnwise=True)) for s in (0, 1)
    )
    ours = optim.AdamW([first], lr=1e-2, master_weights=True)
    first.grad = draw(2)
    ours.step()
    ours = resumed(ours)
    unfrozen, plain = copy.deepcopy(frozen), nn.Parameter(draw(3).bfloat16())
    ours.add_param_group({"params": [unfrozen, plain], "lr": 3e-2})
    want = optim.AdamW([frozen], lr=3e-2)
    for seed in (4, 5):
        (again,) = ours.param_groups[0]["params"]
        again.grad = unfrozen.grad = frozen.grad = draw(seed)
        plain.grad = draw(seed).bfloat16()
        ours.step(), want.step()
    assert same_bytes(unfrozen, frozen) and ours.state[plain]["master"].dtype == F32
    assert ours.state[again]["step"] == 3 and ours.state[unfrozen]["step"] == 2
    for options, message in (
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"betas": (0.9, 2)}, "below 1, got 2"),
    ):
        with raises(ValueError, message):
            ours.add_param_group({"params": [nn.Parameter(draw(6))], **options})
    assert len(ours.param_groups) == 2
    # What was written is read again: the state of both groups.
    other = optim.AdamW(
        [
            {"params": [copy.deepcopy(again)]},
            {"params": [copy.deepcopy(unfrozen), copy.deepcopy(plain)]},
        ]
    )
    other.load_state_dict(ours.state_dict())
    assert [group["lr"] for group in other.param_groups] == [1e-2, 3e-2]


#: Parameters by how a step writes them.
WRITTEN = {
    "plain fp32": (lambda w: nn.Parameter(w), {}, "reference"),
    "plain bf16": (lambda w: nn.Parameter(w.bfloat16()), {}, "reference"),
    "with a master": (lambda w: nn.Parameter(w.bfloat16()), {"master_weights": True}, "reference"),
    "quantized": (lambda w: nn.Parameter(grouped.quantize(w, FORMATS[0])), {}, "reference"),
    "by a kernel": (lambda w: nn.Parameter(grouped.quantize(w, FORMATS[3])), {}, "emulated:sm_90a"),
}


@each(("make", "options", "name"), WRITTEN)
def test_a_step_counts_a_version_of_what_it_writes(make, options, name):
    """Else a backward pass takes new values for old ones, and kept copies of a weight are stale."""
    p = make(draw(0))
    ours, version = optim.AdamW([p], **options), p._version
    loss = (p.dequantize() if isinstance(p, grouped.GroupedTensor) else p).square().sum()
    p.grad = torch.ones(SHAPE, dtype=p.dtype)
    with backend(name):
        ours.step()
    assert p._version > version
    if not isinstance(p, grouped.GroupedTensor):
        with raises(RuntimeError, "modified by an inplace operation"):
            loss.backward()


@each(("make", "options", "name"), WRITTEN)
def test_strided_gradients(make, options, name):
    """Each of the dtypes that need no cast, which would lay them out."""
    w, grad = draw(0), draw(1, 3, 64, 80).mT
    p, want = make(w.clone()), make(w.clone())
    for q, g in ((p, grad.to(p.dtype)), (want, grad.contiguous().to(p.dtype))):
        q.grad = g
        with backend(name):
            optim.AdamW([q], lr=1e-1, **options).step()
    assert not p.grad.is_contiguous() and want.grad.is_contiguous()
    if isinstance(p, grouped.GroupedTensor):
        assert same_bytes(p, want)
    else:
        assert torch.equal(p, want)


@each("fmt", FORMATS, str)
def test_masters_and_loaded_states_are_copies(fmt):
    """The weights that a user gave, and the state that somebody saved, are not written."""
    w = draw(0)
    p, before = nn.Parameter(grouped.quantize(w, fmt)), w.clone()
    ours = optim.AdamW([p], masters={p: w}, lr=1e-1)
    p.grad = draw(1)
    ours.step()
    assert torch.equal(w, before) and not torch.equal(ours.state[p]["master"], before)
    saved = ours.state_dict()
    held = copy.deepcopy(saved["state"])
    other = optim.AdamW([p])
    other.load_state_dict(saved)
    other.step()
    for name, t in held[0].items():
        assert torch.equal(saved["state"][0][name], t) and not torch.equal(
            other.state[p][name], t
        ), name


@each("plain", [True, False])
def test_strides_do_not_count(plain):
    w, grad = draw(0, 3, 64, 80).mT, draw(1)
    p, want = (
        nn.Parameter(w if plain else grouped.quantize(w, FORMATS[0])),
        nn.Parameter(w.contiguous()),
    )
    ours = optim.AdamW([p], masters=None if plain else {p: w})
    p.grad = want.grad = grad
    ours.step(), torch.optim.AdamW([want], fused=True).step()
    assert torch.equal(p if plain else ours.state[p]["master"], want)


def test_main_grad():
    layer = grouped.nn.GroupedLinear(
        2, 32, 32, bias=False, fuse_wgrad_accumulation=True, dtype=BF16
    )
    layer.weight.main_grad = torch.zeros(2, 32, 32)
    start = layer.weight.detach().float()
    ours = optim.AdamW(layer.parameters(), lr=1e-2, master_weights=True)
    layer(draw(2, 7, 32).bfloat16(), [3, 7]).sum().backward()
    want = start.clone().requires_grad_()
    want.grad = layer.weight.main_grad.clone()
    ours.step()
    torch.optim.AdamW([want], lr=1e-2, fused=True).step()
    assert torch.equal(ours.state[layer.weight]["master"], want) and torch.equal(
        layer.weight, want.bfloat16()
    )


def test_grad_scaler_skips_steps_with_infinities():
    p, ours, master, _ = both()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    p.grad = torch.full(SHAPE, torch.inf, dtype=p.dtype)
    scaler.scale(torch.zeros(()))
    scaler.step(ours)
    assert torch.equal(ours.state[p]["master"], master) and same_bytes(p, quantized_like(p, master))
    scaler.update()
    scale = scaler.get_scale()
    p.grad = (draw(1) * scale).bfloat16()
    scaler.step(ours)
    # The skipped step is not counted.
    assert ours.state[p]["step"] == 1
    want = torch.optim.AdamW([master], fused=True)
    master.grad = p.grad.float() / scale
    want.step()
    assert torch.equal(ours.state[p]["master"], master)


def test_faults():
    p = nn.Parameter(grouped.quantize(draw(0), grouped.NVFP4()))
    for options, error, message in (
        ({"lr": float("nan")}, ValueError, r"lr must be at least 0 and finite, got nan"),
        ({"lr": torch.tensor(-1.0)}, ValueError, r"lr must be at least 0 and finite, got -1"),
        ({"lr": torch.ones(2)}, ValueError, r"lr must have one element, got the shape \(2,\)"),
        ({"eps": "1e-8"}, TypeError, r"eps must be a number, got '1e-8'"),
        ({"betas": 0.9}, ValueError, r"betas must be two numbers, got 0.9"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\] must be at least 0 and below 1, got 1"),
        ({"maximize": "no"}, TypeError, r"maximize must be a bool, got 'no'"),
    ):
        ours = optim.AdamW([nn.Parameter(draw(1))])
        for make in (ours.add_param_group, lambda group: optim.AdamW([group])):
            with raises(error, message):
                make({"params": [p], **options})
        assert len(ours.param_groups) == 1
    for masters, error, message in (
        ([p], TypeError, "masters must be a mapping"),
        ({p: draw(0)[:1]}, ValueError, r"must have the shape \(3, 80, 64\), got \(1, 80, 64\)"),
        ({p: p}, TypeError, r"must be plain, in floating point, got GroupedTensor"),
        ({draw(0): draw(0)}, TypeError, "no parameter with a master"),
    ):
        with raises(error, message):
            optim.AdamW([p], masters=masters)
    ours = optim.AdamW([p])
    with raises(ValueError, r"exp_avg .* \(3, 80, 64\), got \(1, 80, 64\)"):
        ours.load_state_dict(ours.state_dict() | {"state": {0: {"exp_avg": draw(0)[:1]}}})
    p.main_grad, p.grad_added_to_main_grad = draw(0)[:1], True
    with raises(ValueError, r"gradient .* \(3, 80, 64\), got \(1, 80, 64\)"):
        ours.step()
    assert not ours.state
    transformed = grouped.quantize(
        draw(0).bfloat16(), grouped.NVFP4(hadamard=True), columnwise=True
    )
    with raises(TypeError, "quantize weights without hadamard"):
        optim.AdamW([nn.Parameter(transformed)])
    q = nn.Parameter(draw(0))
    q.grad = torch.zeros(SHAPE).to_sparse()
    with raises(RuntimeError, "sparse"):
        optim.AdamW([q]).step()
