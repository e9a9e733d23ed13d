"""``AdamW`` for parameters that are quantized: the weights that it updates are an fp32 master.

  weight = nn.Parameter(grouped.quantize(w, grouped.NVFP4(), columnwise=True))
  optimizer = grouped.optim.AdamW([weight], masters={weight: w})

A step is torch's fused AdamW on the master, and one quantization of it into the parameter's
storage: the parameter's bytes are ``grouped.quantize`` of what ``torch.optim.AdamW(fused=True)``
makes of the master, to the bit. There is no bf16 copy of the weight.

On GPUs one kernel does both (``torch.ops.cute_kernels.adamw_quantize``): with bf16 gradients 28
bytes an element go to memory and back in FP8Block and MXFP8. In NVFP4 and FP8, whose groups have
amaxes, these are kept from the update, and a second kernel quantizes: 31 and 32. It rounds as
torch's CUDA kernel does (PyTorch 2.13), which itself updates plain parameters, row-scaled, ragged
and shaped GroupedTensors, and all with ``amsgrad``. On CPUs torch updates everything, and rounds
otherwise.
"""

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer

from cute_kernels import active_backend
from cute_kernels.records import check_kind

from .ownership import check_master
from .tensor.dtensor_parts import local_part, shard_like, wrap_like
from .tensor.grouped_tensor import GroupedTensor
from .tensor.validation import check_is_tensor
from .tracing import eager_only

__all__ = ["AdamW"]

#: What a parameter keeps in fp32.
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_KEPT = {"master", "step", *_MOMENTS}
#: Options of a group of parameters.
_OPTIONS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")


class AdamW(Optimizer):
    """AdamW with fp32 masters and moments.

    GroupedTensors have a master. Plain parameters in fp32 are updated as they are; those in bf16
    and fp16 have a master if ``master_weights`` is set, else they are updated in their dtype, which
    is then that of their moments, as ``torch.optim.AdamW`` does it. Sharded parameters (DTensor)
    are updated shard by shard; a shard of a GroupedTensor must hold whole groups.

    A gradient is ``param.main_grad`` where ``fuse_wgrad_accumulation`` put it there, else
    ``param.grad``. Runs in a CUDA graph if ``lr`` is a tensor there or stays, and with
    ``torch.amp.GradScaler``.

    Args:
        params: parameters, or groups of them.
        lr: learning rate; a number or a tensor of one element.
        betas: decay of the two moments.
        eps: added to the denominator.
        weight_decay: decoupled, as in ``torch.optim.AdamW``.
        amsgrad: as there.
        maximize: as there.
        masters: what GroupedTensors were quantized from, by parameter; of others the master
            starts as what they decode to.
        master_weights: plain parameters in bf16 and fp16 have a master, too.

    Raises:
        ValueError: a number out of range, or a master of another shape.
        TypeError: no number or bool where one belongs, a master that is none or of a parameter
            that has none, or a parameter of a format that no master quantizes to.
    """

    #: GradScaler then leaves the division to the step.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        masters: Mapping[Tensor, Tensor] | None = None,
        master_weights: bool = False,
    ) -> None:
        check_kind(bool, master_weights=master_weights)
        masters = masters or {}
        check_kind(Mapping, masters=masters)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._master_weights = master_weights
        self._versions: dict[int, int] = {}
        super().__init__(params, {**defaults, "amsgrad": amsgrad, "maximize": maximize})
        known = {p for group in self.param_groups for p in group["params"]}
        for p, master in masters.items():
            if p not in known or not self._has_master(p):
                raise TypeError(
                    "masters names a tensor that is no parameter with a master of this optimizer"
                )
            _check_shape("the master", master, p.shape)
            if isinstance(local_part(master), GroupedTensor) or not master.is_floating_point():
                raise TypeError(
                    f"the master of a parameter must be plain, in floating point, got {reprlib.repr(master)}"
                )
            # Copied last: what is sharded may be a view of the whole.
            held = shard_like(p, master.detach()).to(p.device, torch.float32, copy=True)
            self.state[p]["master"] = held.contiguous()
        # Those of the others as well: PyTorch's checkpoints take a state that is not empty for
        # whole.
        for group in self.param_groups if masters else ():
            for p in group["params"]:
                self._state(p, group)
                self._note_version(p)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as PyTorch's optimizers do; it raises what the class raises."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            # PyTorch's class adds defaults of its own, when a state is loaded or the optimizer
            # copied.
            _check_options(**{name: group[name] for name in _OPTIONS})
            for p in group["params"]:
                part = local_part(p)
                if (
                    isinstance(part, GroupedTensor)
                    and part.format.is_transformed
                    and part.columnwise is not None
                ):
                    raise TypeError(
                        f"{part.format} transforms columns in bf16, not of fp32 masters: quantize weights without hadamard"
                    )
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    def _has_master(self, p: Tensor) -> bool:
        is_low = p.dtype in (torch.bfloat16, torch.float16)
        return isinstance(local_part(p), GroupedTensor) or (self._master_weights and is_low)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: makes the loss again, with gradients.

        Returns:
            What ``closure`` returns.

        Raises:
            RuntimeError: a gradient is sparse; or a parameter was written since the last step,
                as by the module's ``load_state_dict``, and its master has other values.
            ValueError: a gradient has another shape than its parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scaling = {
            "grad_scale": getattr(self, "grad_scale", None),
            "found_inf": getattr(self, "found_inf", None),
        }
        for group in self.param_groups:
            written = [(p, grad) for p in group["params"] if (grad := _gradient(p)) is not None]
            self._update(group, written, scaling)
            for p, _ in written:
                self._note_version(p)
        return loss

    @eager_only("powers of beta have the bits of eager mode")
    def _update(
        self, group: dict[str, Any], held: list[tuple[Tensor, Tensor]], scaling: dict[str, Any]
    ) -> None:
        columns: dict[str, list[Tensor]] = {
            name: [] for name in ("param", "target", "grad", "step", *_MOMENTS)
        }
        for p, grad in held:
            part = local_part(p)
            _check_shape("the gradient", local_part(grad), part.shape)
            if grad.is_sparse:
                raise RuntimeError("grouped.optim.AdamW does not take sparse gradients")
            state = self._state(p, group)
            self._check_written(p)
            if _has_kernel(part) and not group["amsgrad"]:
                _update_and_quantize(group, state, part, local_part(grad), **scaling)
                continue
            target = self._target(p)
            columns["param"].append(part)
            columns["step"].append(state["step"])
            columns["target"].append(target)
            columns["grad"].append(local_part(grad).to(target.dtype).contiguous())
            for name in _MOMENTS[: 2 + group["amsgrad"]]:
                columns[name].append(local_part(state[name]))
        if not columns["param"]:
            return
        lists: list[Any] = [columns[name] for name in ("target", "grad", *_MOMENTS, "step")]
        options: dict[str, Any] = {
            n: group[n] for n in ("lr", "weight_decay", "eps", "amsgrad", "maximize")
        }
        options["beta1"], options["beta2"] = group["betas"]
        adamw(*lists, fused=True, **options, **scaling)  # type: ignore[misc]
        for part, target in zip(columns["param"], columns["target"], strict=True):
            if target is part:
                increment_version(part)  # PyTorch's fused kernels count none.
            else:
                _write(part, target)

    def _note_version(self, p: Tensor) -> None:
        """Remember that the master of a parameter has its values."""
        part = local_part(p)
        if self._has_master(p) and not part.is_inference():
            self._versions[id(p)] = part._version

    def _check_written(self, p: Tensor) -> None:
        """Raise if somebody else wrote a parameter since: its master would undo that.

        Only then values are read.
        """
        part, version = local_part(p), self._versions.get(id(p))
        if version is None or part._version == version:
            return
        is_rounded = isinstance(part, GroupedTensor) and part.format.is_stochastic
        if not is_rounded and not (part.is_cuda and torch.cuda.is_current_stream_capturing()):
            check_master(self, p, "another function, such as load_state_dict,")

    @torch.no_grad()
    def _state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter, what is missing made; of a DTensor of DTensors, so that
        checkpoints have all shards.
        """
        state: dict[str, Any] = self.state[p]
        part = local_part(p)
        if self._has_master(p) and "master" not in state:
            master = (
                part.dequantize(torch.float32)
                if isinstance(part, GroupedTensor)
                else part.detach().float().contiguous()
            )
            state["master"] = wrap_like(p, master)
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=part.device)
        for name in _MOMENTS[: 2 + group["amsgrad"]]:
            if name not in state:
                state[name] = wrap_like(p, torch.zeros_like(self._target(p)))
        return state

    def _target(self, p: Tensor) -> Tensor:
        """What a step updates: the master or the parameter.

        Contiguous, as all that goes with it: the fused kernel takes elements as they lie in memory.
        """
        return local_part(self.state[p]["master"] if self._has_master(p) else p).contiguous()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave, also that of ``torch.optim.AdamW``.

        Masters and moments keep fp32. A parameter of which the state has no master keeps the one
        that it has. The parameters' bytes are the module's to load.

        Raises:
            ValueError: a state has another shape than its parameter.
        """
        masters = {p: state["master"] for p, state in self.state.items() if "master" in state}
        pairs = [
            (p, state_dict["state"].get(key, {}))
            for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False)
            for p, key in zip(group["params"], saved["params"], strict=False)
        ]
        # Before anything is changed; PyTorch compares the numbers of parameters alone.
        for p, found in pairs:
            for name in _KEPT & found.keys():
                _check_shape(
                    name,
                    local_part(torch.as_tensor(found[name])),
                    () if name == "step" else local_part(p).shape,
                )
        super().load_state_dict(state_dict)
        self._versions.clear()  # The parameters may be loaded before or after.
        # PyTorch casts states to the dtype of the parameter, and shares ``step``.
        for p, found in pairs:
            held = self._has_master(p)
            dtype = torch.float32 if held else p.dtype
            for name in _KEPT & found.keys():
                value = torch.as_tensor(found[name]).detach()
                if name == "step":
                    self.state[p][name] = value.to(p.device, torch.float32, copy=True)
                else:
                    self.state[p][name] = wrap_like(
                        p, local_part(value).to(p.device, dtype, copy=True).contiguous()
                    )
            if not held:
                self.state[p].pop("master", None)
            elif p in masters:
                self.state[p].setdefault("master", masters[p])

    def __getstate__(self) -> dict[str, Any]:
        # PyTorch's copies have no other attributes.
        return {**super().__getstate__(), "_master_weights": self._master_weights, "_versions": {}}


def _check_options(lr: Any, betas: Any, amsgrad: bool, maximize: bool, **others: Any) -> None:
    is_tensor = isinstance(lr, Tensor)
    if is_tensor and lr.numel() != 1:
        raise ValueError(f"lr must have one element, got the shape {tuple(lr.shape)}")
    check_kind(float, **others, lr=0.0 if is_tensor else lr)
    is_read = not is_tensor or lr.device.type == "cpu"  # no host waits for a GPU
    for name, value in {**({"lr": lr} if is_read else {}), **others}.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be at least 0 and finite, got {value}")
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers, got {betas!r}")
    for i, beta in enumerate(betas):
        check_kind(float, **{f"betas[{i}]": beta})
        if not 0 <= beta < 1:
            raise ValueError(f"betas[{i}] must be at least 0 and below 1, got {beta}")
    check_kind(bool, amsgrad=amsgrad, maximize=maximize)


def _check_shape(name: str, t: Any, shape: Sequence[int]) -> None:
    """The fused kernels read and write as many elements as the parameter has, wherever they lie."""
    check_is_tensor(name, t)
    if t.shape != tuple(shape):
        raise ValueError(
            f"{name} of a parameter must have the shape {tuple(shape)}, got {tuple(t.shape)}"
        )


def _has_kernel(part: Tensor) -> bool:
    """Whether ``adamw_quantize`` takes it, on GPUs, also fake ones, and emulated; elsewhere torch
    updates first.
    """
    if not isinstance(part, GroupedTensor) or part.grouping != "uniform":
        return False
    level = part.format.global_scale
    runs_kernels = part.is_cuda or (part.is_cpu and active_backend(part.device).arch != "reference")
    return (level is None or level.per == "group") and runs_kernels


def _update_and_quantize(
    group: dict[str, Any],
    state: dict[str, Any],
    part: GroupedTensor,
    grad: Tensor,
    grad_scale: Any,
    found_inf: Any,
) -> None:
    (beta1, beta2), step = group["betas"], state["step"].add_(1)

    def number(x: Any) -> Tensor:
        # The host waits for no copy to the GPU, which a CUDA graph refuses: it would keep that
        # value.
        return (
            x.to(step, non_blocking=True).view(())
            if isinstance(x, Tensor)
            else torch.full_like(step, x)
        )

    scale = number(1.0 if grad_scale is None else grad_scale) * (-1.0 if group["maximize"] else 1.0)
    skips = number(0.0 if found_inf is None else found_inf)
    # The powers by the function that torch's kernel calls, of fp32.
    numbers = torch.stack([number(group["lr"]), beta1**step, beta2**step, scale, skips])
    step.sub_(skips)
    update = {name: local_part(state[name]) for name in _MOMENTS[:2]} | {
        "grad": grad,
        "numbers": numbers,
    }
    update |= {
        "beta1": beta1,
        "beta2": beta2,
        "eps": group["eps"],
        "weight_decay": group["weight_decay"],
    }
    part._quantize_into(local_part(state["master"]), None, update=update)


def _gradient(p: Tensor) -> Tensor | None:
    main: Tensor | None = getattr(p, "main_grad", None)
    return main if main is not None and getattr(p, "grad_added_to_main_grad", False) else p.grad


def _write(p: Tensor, master: Tensor) -> None:
    if isinstance(p, GroupedTensor):
        p._quantize_into(master, p.offs)
    else:
        p.copy_(master)
