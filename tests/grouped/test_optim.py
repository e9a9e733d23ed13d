"""``grouped.optim.AdamW`` against torch's AdamW on fp32 masters, which are then quantized."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import grouped
from cute_kernels import backend
from cute_kernels.reference.adamw import adamw
from grouped import optim
from tests.helpers import BF16, F32, U8, each_arch, seeded_generator

FORMATS = [
    grouped.NVFP4(),
    grouped.NVFP4(block=(16, 16)),
    grouped.MXFP8(),
    grouped.FP8Block(block=(128, 128)),
    grouped.FP8(),
]
SHAPE = (3, 80, 64)


def draw(seed, *shape):
    return torch.randn(*(shape or SHAPE), generator=seeded_generator(seed))


def same_bytes(p, q):
    return all(
        torch.equal(a.view(U8), b.view(U8))
        for a, b in zip(p._inner().values(), q._inner().values(), strict=True)
    )


def make_pair(fmt=FORMATS[0], dtype=BF16, **options):
    """Return a quantized parameter and an fp32 master, each with its optimizer."""
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
    """Take a step of both optimizers with one gradient."""
    grad = (draw(seed) * factor).to(p.dtype)
    p.grad, master.grad = grad, grad.float()
    ours.step()
    theirs.step()


def quantized_like(p, master):
    q = grouped.quantize(master.detach(), p.format, columnwise=True)
    assert q.shape == p.shape
    return q


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"amsgrad": True, "maximize": True, "weight_decay": 0.3}], ids=["", "amsgrad"]
)
def test_a_step_is_torchs_step_then_quantize(fmt, options):
    """Compare a step with PyTorch's AdamW followed by quantization."""
    pair = make_pair(fmt, lr=3e-2, **options)
    p, _, master, _ = pair
    for seed in range(1, 4):
        step(*pair, seed)
        assert same_bytes(p, quantized_like(p, master))
    assert torch.equal(pair[1].state[p]["master"], master) and p.dtype == BF16


class KernelSteps:
    """Steps of ``optim.AdamW`` on an emulated GPU, each compared with the reference.

    The reference has the arithmetic of torch's CUDA kernel, which differs from torch's on CPUs.

    Attributes:
        p: The quantized parameter.
        optimizer: Its optimizer, which maximizes.
        expected: Master, first and second moment by the reference.
        count: Number of steps that were not skipped.
    """

    def __init__(self, fmt, arch, *, is_prepacked=False):
        w = draw(0)
        self.arch = arch
        self.options = {"scale": torch.ones(3)} if fmt.has_given_scale else {}
        q = grouped.quantize(w.bfloat16(), fmt, columnwise=True, **self.options)
        self.p = nn.Parameter(q.prepack() if is_prepacked else q)
        self.optimizer = optim.AdamW(
            [self.p],
            masters={self.p: w},
            lr=torch.tensor(3e-2),
            maximize=True,
            betas=(0.8, 0.99),
            eps=1e-6,
            weight_decay=0.3,
        )
        self.expected = [w.clone(), *torch.zeros(2, *SHAPE)]
        self.count = 0

    def step(self, grad, take_step=None, *, loss_scale=1.0, is_skipped=False):
        """Take a step with the bf16 gradient ``grad`` and compare bytes, state and version.

        Args:
            grad: The gradient, which the parameter already has.
            take_step: The call that takes the step, if not ``optimizer.step``.
            loss_scale: What a GradScaler has multiplied the gradient by.
            is_skipped: Whether the GradScaler skips the step.
        """
        self.count += not is_skipped
        numbers = torch.tensor([3e-2, 0.8, 0.99, -loss_scale, is_skipped])
        numbers[1:3] **= max(self.count, 1)
        adamw(self.expected, grad, numbers, (0.8, 0.99, 1e-6, 0.3))
        version = self.p._version
        torch.manual_seed(7)
        with backend(f"emulated:{self.arch}"):
            (take_step or self.optimizer.step)()
        torch.manual_seed(7)
        q = grouped.quantize(self.expected[0], self.p.format, columnwise=True, **self.options)
        assert same_bytes(self.p, q.prepack() if self.p.prepacked else q)
        assert self.p._version > version
        state = self.optimizer.state[self.p]
        assert state["step"] == self.count
        for name, want in zip(("master", *optim._MOMENTS[:2]), self.expected, strict=True):
            assert torch.equal(state[name], want), name


KERNEL_FORMATS = [
    *FORMATS,
    grouped.FP8(scaling="delayed"),
    grouped.NVFP4(stochastic_rounding=True),
]


@pytest.mark.emulated
@each_arch
@pytest.mark.parametrize("fmt", KERNEL_FORMATS, ids=str)
def test_a_kernel_is_torchs_cuda_kernel_then_quantize(fmt, arch):
    steps = KernelSteps(fmt, arch)
    for seed in (1, 2):
        steps.p.grad = draw(seed).bfloat16()
        steps.step(steps.p.grad)


@pytest.mark.emulated
@each_arch
@pytest.mark.parametrize("fmt", KERNEL_FORMATS, ids=str)
def test_a_kernel_skips_a_step_under_grad_scaler(fmt, arch):
    """The gradient of the second step is infinite; the third step counts as the second."""
    steps, scaler = KernelSteps(fmt, arch), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    for grad in (draw(1), torch.full(SHAPE, torch.inf), draw(2)):
        steps.p.grad = grad.bfloat16()
        steps.step(
            steps.p.grad,
            lambda: scaler.step(steps.optimizer),
            loss_scale=scaler.get_scale(),
            is_skipped=bool(grad.isinf().any()),
        )
        scaler.update()


@pytest.mark.emulated
@each_arch
@pytest.mark.parametrize("fmt", KERNEL_FORMATS, ids=str)
def test_a_kernel_reads_a_main_grad(fmt, arch):
    """Check that the fused kernel reads ``main_grad``."""
    steps = KernelSteps(fmt, arch)
    steps.p.grad = draw(1).bfloat16()
    steps.step(steps.p.grad)
    grad = draw(2).bfloat16()
    steps.p.main_grad, steps.p.grad_added_to_main_grad = grad.float(), True
    steps.p.grad = torch.zeros_like(grad)
    steps.step(grad)


@pytest.mark.emulated
@each_arch
def test_a_kernel_writes_prepacked_codes(arch):
    steps = KernelSteps(FORMATS[0], arch, is_prepacked=True)
    for seed in (1, 2):
        steps.p.grad = draw(seed).bfloat16()
        steps.step(steps.p.grad)


@pytest.mark.compile
@pytest.mark.compile
@pytest.mark.emulated
@each_arch
def test_a_compiled_step_calls_the_kernel(arch, fresh_dynamo):
    steps = KernelSteps(FORMATS[3], arch)
    compiled = torch.compile(steps.optimizer.step, backend="eager")
    for seed in (1, 2):
        steps.p.grad = draw(seed).bfloat16()
        steps.step(steps.p.grad, compiled)


def test_a_step_on_fake_cuda_tensors():
    """Without a GPU, FakeTensorMode can trace a step on one."""
    with FakeTensorMode():
        p = nn.Parameter(grouped.quantize(torch.zeros(SHAPE, device="cuda"), FORMATS[2]))
        p.grad = torch.zeros_like(p, dtype=F32)
        optim.AdamW([p]).step()


NO_KERNEL = {
    "amsgrad": (SHAPE, {}, True),
    "ragged": (SHAPE[1:], {"offs": [80]}, False),
    "shapes": ((3 * 80 * 64,), {"shapes": [(80, 64)] * 3}, False),
    "row-scaled": (SHAPE, {"fmt": grouped.NVFP4(row_scaled=True)}, False),
}


@pytest.mark.emulated
@pytest.mark.parametrize(("shape", "options", "amsgrad"), NO_KERNEL.values(), ids=NO_KERNEL)
def test_torch_steps_masters_that_have_no_kernel(shape, options, amsgrad):
    """Check that PyTorch updates masters that no kernel supports."""
    p = nn.Parameter(grouped.quantize(draw(0, *shape), **{"fmt": FORMATS[0]} | options))
    master = p.detach().dequantize().requires_grad_()
    ours = optim.AdamW([p], amsgrad=amsgrad)
    theirs = torch.optim.AdamW([master], fused=True, amsgrad=amsgrad)
    p.grad = master.grad = draw(1, *shape)
    with backend("emulated:sm_90a"):
        ours.step(), theirs.step()
    assert torch.equal(ours.state[p]["master"], master)


def test_a_master_starts_as_the_decoded_parameter():
    """Check that a missing master starts as the decoded parameter."""
    p = nn.Parameter(grouped.quantize(draw(0).bfloat16(), grouped.NVFP4()))
    ours = optim.AdamW([p], lr=1e-3)
    start, version = p.dequantize(F32), p._version
    p.grad = torch.zeros(SHAPE, dtype=BF16)
    ours.step()
    assert torch.equal(ours.state[p]["master"], start * (1 - 1e-3 * 1e-2)) and p._version > version


def test_a_step_returns_the_value_of_its_closure():
    p = nn.Parameter(grouped.quantize(draw(0).bfloat16(), grouped.NVFP4()))
    p.grad = torch.zeros(SHAPE, dtype=BF16)
    assert optim.AdamW([p]).step(lambda: 7) == 7


def test_groups_have_their_learning_rates():
    """Check that parameter groups keep their own learning rates."""
    w = draw(0).bfloat16()
    p, plain = nn.Parameter(grouped.quantize(w, grouped.NVFP4())), nn.Parameter(w.clone())
    ours = optim.AdamW([{"params": [p]}, {"params": [plain], "lr": 0.0}], master_weights=True)
    start = p.dequantize(F32)
    p.grad, plain.grad = torch.ones_like(plain), torch.ones_like(plain)
    ours.step()
    assert torch.equal(plain, w) and ours.state[plain]["master"].dtype == F32
    assert not torch.equal(ours.state[p]["master"], start)


def test_a_parameter_without_a_gradient_gets_no_state():
    """Check that a parameter without a gradient gets no state."""
    p = nn.Parameter(grouped.quantize(draw(0).bfloat16(), grouped.NVFP4()))
    unused = nn.Parameter(draw(0).bfloat16())
    ours = optim.AdamW([p, unused], master_weights=True)
    p.grad = torch.zeros(SHAPE, dtype=BF16)
    ours.step()
    assert not ours.state[unused]


def test_torch_steps_plain_parameters_without_masters():
    """Compare plain parameters without masters to PyTorch's AdamW."""
    a, b = (nn.Parameter(draw(1).bfloat16()) for _ in range(2))
    ours, theirs = optim.AdamW([a], lr=1e-2), torch.optim.AdamW([b], lr=1e-2, fused=True)
    for seed in range(2):
        a.grad = b.grad = draw(seed).bfloat16()
        ours.step(), theirs.step()
    assert torch.equal(a, b) and ours.state[a]["exp_avg"].dtype == BF16


def test_state_dict_keeps_fp32():
    """Check that loading ``state_dict`` keeps masters and moments in fp32."""
    pair = make_pair()
    step(*pair, 1)
    p, ours, *_ = pair
    q = nn.Parameter(grouped.quantize(draw(5).bfloat16(), p.format, columnwise=True))
    loaded = optim.AdamW([q])
    loaded.load_state_dict(ours.state_dict())
    with torch.no_grad():
        q.copy_(p)
    assert {n: t.dtype for n, t in loaded.state[q].items()} == dict.fromkeys(ours.state[p], F32)
    step(*pair, 2)
    q.grad = p.grad
    loaded.step()
    assert same_bytes(p, q) and torch.equal(loaded.state[q]["master"], ours.state[p]["master"])
    assert loaded.state[q]["master"] is not ours.state[p]["master"]


def state_of_torch(w):
    """Return the state_dict of torch's AdamW after a step of the bf16 parameter ``w``."""
    p = nn.Parameter(w.clone())
    p.grad = draw(1).bfloat16()
    optimizer = torch.optim.AdamW([p])
    optimizer.step()
    return optimizer.state_dict()


def loaded_from_torch(w, quantized):
    """Return a parameter and its optimizer with a master and torch's state."""
    p = nn.Parameter(grouped.quantize(w, FORMATS[0]) if quantized else w.clone())
    optimizer = optim.AdamW([p], masters={p: w}, master_weights=True)
    optimizer.load_state_dict(state_of_torch(w))
    return p, optimizer


@pytest.mark.parametrize("quantized", [True, False], ids=["quantized", "plain"])
def test_moments_of_torch_become_fp32_and_a_master_stays(quantized):
    """Check that PyTorch's moments are cast to fp32, and that masters are kept."""
    w = draw(0).bfloat16()
    p, ours = loaded_from_torch(w, quantized)
    assert torch.equal(ours.state[p]["master"], w.float())
    assert ours.state[p]["exp_avg"].dtype == F32


@pytest.mark.parametrize("quantized", [True, False], ids=["quantized", "plain"])
def test_a_deep_copy_steps_as_the_original(quantized):
    """Check that a deep copy of an optimizer makes the same step."""
    p, ours = loaded_from_torch(draw(0).bfloat16(), quantized)
    copied = copy.deepcopy(ours)
    (q,) = copied.param_groups[0]["params"]
    p.grad = q.grad = draw(2).bfloat16()
    ours.step(), copied.step()
    assert torch.equal(ours.state[p]["master"], copied.state[q]["master"])


def test_an_optimizer_without_masters_drops_a_loaded_one():
    """Check that an optimizer without masters drops a loaded master."""
    w = draw(0).bfloat16()
    _, ours = loaded_from_torch(w, quantized=False)
    p = nn.Parameter(w.clone())
    without = optim.AdamW([p])
    without.load_state_dict(ours.state_dict())
    without.param_groups[0]["amsgrad"] = True
    p.grad = draw(2).bfloat16()
    without.step()
    state = without.state[p]
    assert state.keys() == {"step", *optim._MOMENTS} and state["exp_avg"].dtype == BF16


def reload(optimizer):
    optimizer.load_state_dict(optimizer.state_dict())
    return optimizer


RESUME = {
    "load_state_dict": reload,
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "all": lambda optimizer: copy.deepcopy(reload(pickle.loads(pickle.dumps(optimizer)))),
}


def resumed_optimizer(resume):
    """Return an optimizer of one quantized parameter that has taken a step and was resumed."""
    p = nn.Parameter(grouped.quantize(draw(0), FORMATS[0], columnwise=True))
    optimizer = optim.AdamW([p], lr=1e-2, master_weights=True)
    p.grad = draw(2)
    optimizer.step()
    return resume(optimizer)


@pytest.mark.parametrize("resume", RESUME.values(), ids=RESUME)
def test_parameters_unfrozen_after_a_resume(resume):
    """An added group steps as a new optimizer, and ``state_dict`` has both groups."""
    ours = resumed_optimizer(resume)
    frozen = nn.Parameter(grouped.quantize(draw(1), FORMATS[0], columnwise=True))
    unfrozen, plain = copy.deepcopy(frozen), nn.Parameter(draw(3).bfloat16())
    ours.add_param_group({"params": [unfrozen, plain], "lr": 3e-2})
    want = optim.AdamW([frozen], lr=3e-2)
    (resumed,) = ours.param_groups[0]["params"]
    for seed in (4, 5):
        resumed.grad = unfrozen.grad = frozen.grad = draw(seed)
        plain.grad = draw(seed).bfloat16()
        ours.step(), want.step()
    assert same_bytes(unfrozen, frozen) and ours.state[plain]["master"].dtype == F32
    assert ours.state[resumed]["step"] == 3 and ours.state[unfrozen]["step"] == 2
    loaded = optim.AdamW(
        [
            {"params": [copy.deepcopy(resumed)]},
            {"params": [copy.deepcopy(unfrozen), copy.deepcopy(plain)]},
        ]
    )
    loaded.load_state_dict(ours.state_dict())
    assert [group["lr"] for group in loaded.param_groups] == [1e-2, 3e-2]


@pytest.mark.parametrize("resume", RESUME.values(), ids=RESUME)
def test_a_resumed_optimizer_checks_added_groups(resume):
    ours = resumed_optimizer(resume)
    for options, message in (
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"betas": (0.9, 2)}, "below 1, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            ours.add_param_group({"params": [nn.Parameter(draw(6))], **options})
    assert len(ours.param_groups) == 1


#: Parameters by how a step writes them.
WRITTEN = {
    "plain fp32": (lambda w: nn.Parameter(w), {}, "reference"),
    "plain bf16": (lambda w: nn.Parameter(w.bfloat16()), {}, "reference"),
    "with a master": (lambda w: nn.Parameter(w.bfloat16()), {"master_weights": True}, "reference"),
    "quantized": (lambda w: nn.Parameter(grouped.quantize(w, FORMATS[0])), {}, "reference"),
    "by a kernel": (lambda w: nn.Parameter(grouped.quantize(w, FORMATS[3])), {}, "emulated:sm_90a"),
}


@pytest.mark.parametrize(("make", "options", "name"), WRITTEN.values(), ids=WRITTEN)
def test_a_step_counts_a_version_of_the_parameter(make, options, name):
    """Otherwise a backward pass would read new values, and cached copies of a weight be stale."""
    p = make(draw(0))
    ours, version = optim.AdamW([p], **options), p._version
    loss = (p.dequantize() if isinstance(p, grouped.GroupedTensor) else p).square().sum()
    p.grad = torch.ones(SHAPE, dtype=p.dtype)
    with backend(name):
        ours.step()
    assert p._version > version
    if not isinstance(p, grouped.GroupedTensor):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize(("make", "options", "name"), WRITTEN.values(), ids=WRITTEN)
def test_gradients_may_be_strided(make, options, name):
    """Gradients have the dtype of the parameter: a cast would make them contiguous."""
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


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_masters_and_loaded_states_are_copies(fmt):
    """A step writes neither the user's weights nor a saved state."""
    w = draw(0)
    p, before = nn.Parameter(grouped.quantize(w, fmt)), w.clone()
    ours = optim.AdamW([p], masters={p: w}, lr=1e-1)
    p.grad = draw(1)
    ours.step()
    assert torch.equal(w, before) and not torch.equal(ours.state[p]["master"], before)
    saved = ours.state_dict()
    before_step = copy.deepcopy(saved["state"])[0]
    loaded = optim.AdamW([p])
    loaded.load_state_dict(saved)
    loaded.step()
    for name, t in before_step.items():
        assert torch.equal(saved["state"][0][name], t), name
        assert not torch.equal(loaded.state[p][name], t), name


@pytest.mark.parametrize("plain", [True, False])
def test_parameters_may_be_strided(plain):
    """Check that parameters may be strided."""
    w, grad = draw(0, 3, 64, 80).mT, draw(1)
    p, want = (
        nn.Parameter(w if plain else grouped.quantize(w, FORMATS[0])),
        nn.Parameter(w.contiguous()),
    )
    ours = optim.AdamW([p], masters=None if plain else {p: w})
    p.grad = want.grad = grad
    ours.step(), torch.optim.AdamW([want], fused=True).step()
    assert torch.equal(p if plain else ours.state[p]["master"], want)


def test_a_main_grad_of_a_layer():
    """Check that a step uses the ``main_grad`` of a layer."""
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
    """Check that ``GradScaler`` skips a step with infinite gradients."""
    p, ours, master, _ = make_pair()
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


@pytest.fixture
def p():
    return nn.Parameter(grouped.quantize(draw(0), grouped.NVFP4()))


INVALID_OPTIONS = {
    "nan": ({"lr": float("nan")}, ValueError, "lr must be at least 0 and finite, got nan"),
    "negative": (
        {"lr": torch.tensor(-1.0)},
        ValueError,
        "lr must be at least 0 and finite, got -1",
    ),
    "two rates": (
        {"lr": torch.ones(2)},
        ValueError,
        r"lr must have one element, got the shape \(2,\)",
    ),
    "text": ({"eps": "1e-8"}, TypeError, "eps must be a number, got '1e-8'"),
    "one beta": ({"betas": 0.9}, ValueError, "betas must be two numbers, got 0.9"),
    "beta of 1": (
        {"betas": (0.9, 1.0)},
        ValueError,
        r"betas\[1\] must be at least 0 and below 1, got 1",
    ),
    "no bool": ({"maximize": "no"}, TypeError, "maximize must be a bool, got 'no'"),
}
invalid_options = pytest.mark.parametrize(
    ("options", "error", "message"), INVALID_OPTIONS.values(), ids=INVALID_OPTIONS
)


@invalid_options
def test_construction_checks_options(options, error, message, p):
    with pytest.raises(error, match=message):
        optim.AdamW([{"params": [p], **options}])


@invalid_options
def test_add_param_group_checks_options(options, error, message, p):
    ours = optim.AdamW([nn.Parameter(draw(1))])
    with pytest.raises(error, match=message):
        ours.add_param_group({"params": [p], **options})
    assert len(ours.param_groups) == 1


INVALID_MASTERS = {
    "list": (lambda p: [p], TypeError, "masters must be a mapping"),
    "shape": (
        lambda p: {p: draw(0)[:1]},
        ValueError,
        r"must have the shape \(3, 80, 64\), got \(1, 80, 64\)",
    ),
    "quantized": (
        lambda p: {p: p},
        TypeError,
        "must be plain, in floating point, got GroupedTensor",
    ),
    "unknown parameter": (
        lambda p: {draw(0): draw(0)},
        TypeError,
        "not a parameter with a master",
    ),
}


@pytest.mark.parametrize(
    ("make", "error", "message"), INVALID_MASTERS.values(), ids=INVALID_MASTERS
)
def test_masters_are_checked(make, error, message, p):
    with pytest.raises(error, match=message):
        optim.AdamW([p], masters=make(p))


def test_shapes_of_a_loaded_state_are_checked(p):
    ours = optim.AdamW([p])
    with pytest.raises(ValueError, match=r"exp_avg .* \(3, 80, 64\), got \(1, 80, 64\)"):
        ours.load_state_dict(ours.state_dict() | {"state": {0: {"exp_avg": draw(0)[:1]}}})


def test_the_shape_of_a_main_grad_is_checked(p):
    """Check that a ``main_grad`` of a wrong shape is refused."""
    ours = optim.AdamW([p])
    p.main_grad, p.grad_added_to_main_grad = draw(0)[:1], True
    with pytest.raises(ValueError, match=r"gradient .* \(3, 80, 64\), got \(1, 80, 64\)"):
        ours.step()
    assert not ours.state


def test_transformed_weights_are_refused():
    fmt = grouped.NVFP4(hadamard=True)
    transformed = grouped.quantize(draw(0).bfloat16(), fmt, columnwise=True)
    with pytest.raises(TypeError, match="quantize weights without hadamard"):
        optim.AdamW([nn.Parameter(transformed)])


def test_sparse_gradients_are_refused():
    p = nn.Parameter(draw(0))
    p.grad = torch.zeros(SHAPE).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optim.AdamW([p]).step()
