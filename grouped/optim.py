"""``AdamW`` for quantized parameters: it updates an fp32 master of each weight.

    weight = nn.Parameter(grouped.quantize(w, grouped.NVFP4(), columnwise=True))
    optimizer = grouped.optim.AdamW([weight], masters={weight: w})

A step is torch's fused AdamW on the master, and one quantization of the master into the parameter's
storage. The parameter has the bits of ``grouped.quantize(master)`` after
``torch.optim.AdamW(fused=True)``. There is no bf16 copy of the weight.

On GPUs one kernel does both (``torch.ops.cute_kernels.adamw_quantize``). With bf16 gradients it
moves 28 bytes per element to memory and back in FP8Block and MXFP8. In NVFP4 and FP8, whose groups
have amaxes, the update computes the amaxes and a second kernel quantizes: 31 and 32 bytes per
element. The kernel rounds as torch's CUDA kernel does (PyTorch 2.13). torch's kernel updates plain
parameters, row-scaled, ragged and shaped GroupedTensors, and all parameters with ``amsgrad``. On
CPUs torch updates everything, and rounds differently.
"""

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer

from cute_kernels import active_backend
from cute_kernels.records import check_kind
from ptx_emulator.host.suggestions import module_attributes

from .ownership import check_master
from .tensor.dtensor_parts import local_part, shard_like, wrap_like
from .tensor.grouped_tensor import GroupedTensor
from .tensor.validation import check_is_tensor
from .tracing import eager_only

__all__ = ["AdamW"]

if not TYPE_CHECKING:
    __getattr__ = module_attributes(__name__)


def __dir__() -> list[str]:
    return sorted(__all__)


#: Moments of a parameter.
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
#: Keys of the state of a parameter.
_STATE_KEYS = {"master", "step", *_MOMENTS}
#: Options of a group of parameters.
_OPTIONS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")


class AdamW(Optimizer):
    """AdamW with fp32 masters and moments.

    GroupedTensors have a master. Plain parameters in fp32 are updated as they are. Plain parameters
    in bf16 and fp16 have a master if ``master_weights`` is set; else they and their moments are
    updated in their dtype, as in ``torch.optim.AdamW``. Sharded parameters (DTensor) are updated
    shard by shard; a shard of a GroupedTensor must consist of whole groups.

    The gradient is ``param.main_grad`` if ``fuse_wgrad_accumulation`` wrote it there, else
    ``param.grad``. The optimizer runs in a CUDA graph if ``lr`` is a tensor on the device or does
    not change, and with ``torch.amp.GradScaler``.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate; a number or a tensor of one element.
        betas: Decay of the two moments.
        eps: Term added to the denominator.
        weight_decay: Decoupled weight decay. See ``torch.optim.AdamW``.
        amsgrad: See ``torch.optim.AdamW``.
        maximize: See ``torch.optim.AdamW``.
        masters: Values that GroupedTensors were quantized from, by parameter. Other masters start
            as the decoded values.
        master_weights: True if plain parameters in bf16 and fp16 have a master, too.

    Raises:
        ValueError: A number is out of range, or a master has another shape.
        TypeError: An argument has another type, a master is not a plain floating-point tensor or is
            for a parameter without one, or fp32 masters cannot be quantized to the format of a
            parameter.
    """

    #: Tells GradScaler that the step divides by the scale.
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
                    "masters names a tensor that is not a parameter with a master of this optimizer"
                )
            _check_shape("the master", master, p.shape)
            if isinstance(local_part(master), GroupedTensor) or not master.is_floating_point():
                raise TypeError(
                    "the master of a parameter must be plain, in floating point, got "
                    f"{reprlib.repr(master)}"
                )
            # Copied last: a shard may be a view of the whole tensor.
            sharded = shard_like(p, master.detach())
            master_copy = sharded.to(p.device, torch.float32, copy=True)
            self.state[p]["master"] = master_copy.contiguous()
        # The state of all parameters: PyTorch's checkpoints take a state that is not empty for a
        # complete one.
        for group in self.param_groups if masters else ():
            for p in group["params"]:
                self._state(p, group)
                self._note_version(p)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as PyTorch's optimizers do; raises like the constructor.

        Args:
            param_group: Parameters (``"params"``), and options that differ from the defaults.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            # PyTorch's AdamW adds its default options when a state is loaded or the optimizer is
            # copied.
            _check_options(**{name: group[name] for name in _OPTIONS})
            for p in group["params"]:
                _check_transform(local_part(p))
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    def _has_master(self, p: Tensor) -> bool:
        is_16_bit = p.dtype in (torch.bfloat16, torch.float16)
        return isinstance(local_part(p), GroupedTensor) or (self._master_weights and is_16_bit)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: Evaluates the loss again, with gradients.

        Returns:
            The result of ``closure``.

        Raises:
            RuntimeError: A gradient is sparse. Or a parameter was written since the last step, for
                example by the module's ``load_state_dict``, and its master has other values.
            ValueError: The shape of a gradient differs from that of its parameter.
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
            updates = [(p, grad) for p in group["params"] if (grad := _gradient(p)) is not None]
            self._update(group, updates, scaling)
            for p, _ in updates:
                self._note_version(p)
        return loss

    @eager_only("powers of beta have the bits of eager mode")
    def _update(
        self, group: dict[str, Any], updates: list[tuple[Tensor, Tensor]], scaling: dict[str, Any]
    ) -> None:
        """Update the parameters of a group.

        Args:
            group: Options of the group.
            updates: Parameters and their gradients.
            scaling: ``grad_scale`` and ``found_inf`` of GradScaler.
        """
        columns: dict[str, list[Tensor]] = {
            name: [] for name in ("param", "target", "grad", "step", *_MOMENTS)
        }
        for p, grad in updates:
            local = local_part(p)
            _check_shape("the gradient", local_part(grad), local.shape)
            if grad.is_sparse:
                raise RuntimeError("grouped.optim.AdamW does not take sparse gradients")
            state = self._state(p, group)
            self._check_written(p)
            if _has_kernel(local) and not group["amsgrad"]:
                _update_and_quantize(group, state, local, local_part(grad), **scaling)
                continue
            target = self._target(p)
            columns["param"].append(local)
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
        for local, target in zip(columns["param"], columns["target"], strict=True):
            if target is local:
                increment_version(local)  # PyTorch's fused kernels do not count versions.
            else:
                _write(local, target)

    def _note_version(self, p: Tensor) -> None:
        """Record that the master of a parameter has its values."""
        local = local_part(p)
        if self._has_master(p) and not local.is_inference():
            self._versions[id(p)] = local._version

    def _check_written(self, p: Tensor) -> None:
        """Raise if a parameter was written since the last step: its master would undo that.

        Values are read only if the version of the parameter changed.
        """
        local, version = local_part(p), self._versions.get(id(p))
        if version is None or local._version == version:
            return
        is_stochastic = isinstance(local, GroupedTensor) and local.format.is_stochastic
        if not is_stochastic and not (local.is_cuda and torch.cuda.is_current_stream_capturing()):
            check_master(self, p, "load_state_dict() or another function")

    @torch.no_grad()
    def _state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter, and make what is missing.

        The state of a DTensor has DTensors, so that checkpoints have all shards.
        """
        state: dict[str, Any] = self.state[p]
        local = local_part(p)
        if self._has_master(p) and "master" not in state:
            master = (
                local.dequantize(torch.float32)
                if isinstance(local, GroupedTensor)
                else local.detach().float().contiguous()
            )
            state["master"] = wrap_like(p, master)
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=local.device)
        for name in _MOMENTS[: 2 + group["amsgrad"]]:
            if name not in state:
                state[name] = wrap_like(p, torch.zeros_like(self._target(p)))
        return state

    def _target(self, p: Tensor) -> Tensor:
        """Return the tensor that a step updates: the master or the parameter.

        It is contiguous, like the gradient and the moments: the fused kernel reads elements in the
        order of memory.
        """
        return local_part(self.state[p]["master"] if self._has_master(p) else p).contiguous()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of ``torch.optim.AdamW``.

        Masters and moments stay in fp32. A parameter whose state has no master keeps its present
        master. The parameters are loaded by the module, not here.

        Args:
            state_dict: Result of ``state_dict()``.

        Raises:
            ValueError: The shape of a state differs from that of its parameter.
        """
        masters = {p: state["master"] for p, state in self.state.items() if "master" in state}
        pairs = [
            (p, state_dict["state"].get(key, {}))
            for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False)
            for p, key in zip(group["params"], saved["params"], strict=False)
        ]
        # Check shapes before anything changes. PyTorch compares only the numbers of parameters.
        for p, loaded in pairs:
            for name in _STATE_KEYS & loaded.keys():
                shape = () if name == "step" else local_part(p).shape
                _check_shape(name, local_part(torch.as_tensor(loaded[name])), shape)
        super().load_state_dict(state_dict)
        self._versions.clear()  # The parameters may be loaded before or after.
        # PyTorch casts states to the dtype of the parameter, and shares ``step``.
        for p, loaded in pairs:
            has_master = self._has_master(p)
            dtype = torch.float32 if has_master else p.dtype
            for name in _STATE_KEYS & loaded.keys():
                value = torch.as_tensor(loaded[name]).detach()
                if name == "step":
                    self.state[p][name] = value.to(p.device, torch.float32, copy=True)
                else:
                    self.state[p][name] = wrap_like(
                        p, local_part(value).to(p.device, dtype, copy=True).contiguous()
                    )
            if not has_master:
                self.state[p].pop("master", None)
            elif p in masters:
                self.state[p].setdefault("master", masters[p])

    def __getstate__(self) -> dict[str, Any]:
        # PyTorch's copies have no other attributes.
        return {**super().__getstate__(), "_master_weights": self._master_weights, "_versions": {}}


def _check_options(lr: Any, betas: Any, amsgrad: bool, maximize: bool, **numbers: Any) -> None:
    """Raise unless the options of a group are valid; ``numbers`` are eps and weight_decay."""
    is_tensor = isinstance(lr, Tensor)
    if is_tensor and lr.numel() != 1:
        raise ValueError(f"lr must have one element, got the shape {tuple(lr.shape)}")
    check_kind(float, **numbers, lr=0.0 if is_tensor else lr)
    if not is_tensor or lr.device.type == "cpu":  # The host does not wait for a GPU.
        numbers = {"lr": lr, **numbers}
    for name, value in numbers.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be at least 0 and finite, got {value}")
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers, got {betas!r}")
    for i, beta in enumerate(betas):
        check_kind(float, **{f"betas[{i}]": beta})
        if not 0 <= beta < 1:
            raise ValueError(f"betas[{i}] must be at least 0 and below 1, got {beta}")
    check_kind(bool, amsgrad=amsgrad, maximize=maximize)


def _check_transform(p: Tensor) -> None:
    """Raise TypeError for a columnwise copy that fp32 masters cannot be quantized to."""
    if isinstance(p, GroupedTensor) and p.format.is_transformed and p.columnwise is not None:
        raise TypeError(
            f"{p.format} transforms columns in bf16, not of fp32 masters: quantize weights without "
            "hadamard"
        )


def _check_shape(name: str, t: Any, shape: Sequence[int]) -> None:
    """Raise unless ``t`` has a shape: the fused kernels access as many elements as parameters."""
    check_is_tensor(name, t)
    if t.shape != tuple(shape):
        raise ValueError(
            f"{name} of a parameter must have the shape {tuple(shape)}, got {tuple(t.shape)}"
        )


def _has_kernel(p: Tensor) -> bool:
    """Return True if ``adamw_quantize`` updates a parameter: on real, fake and emulated GPUs.

    Elsewhere torch updates the master, which is then quantized.
    """
    if not isinstance(p, GroupedTensor) or p.grouping != "uniform":
        return False
    level = p.format.global_scale
    runs_kernels = p.is_cuda or (p.is_cpu and active_backend(p.device).arch != "reference")
    return (level is None or level.per == "group") and runs_kernels


def _update_and_quantize(
    group: dict[str, Any],
    state: dict[str, Any],
    p: GroupedTensor,
    grad: Tensor,
    grad_scale: Any,
    found_inf: Any,
) -> None:
    """Update a master and quantize it into its parameter, on the device.

    Args:
        group: Options of the group.
        state: State of the parameter.
        p: The parameter, or this rank's part.
        grad: Its gradient.
        grad_scale: Factor of the gradient from GradScaler, or None.
        found_inf: 1 from GradScaler to skip the step, or None.
    """
    (beta1, beta2), step = group["betas"], state["step"].add_(1)

    def number(x: Any) -> Tensor:
        # Numbers are filled on the GPU: a CUDA graph refuses a copy for which the host waits.
        if isinstance(x, Tensor):
            return x.to(step, non_blocking=True).view(())
        return torch.full_like(step, x)

    scale = number(1.0 if grad_scale is None else grad_scale) * (-1.0 if group["maximize"] else 1.0)
    skips = number(0.0 if found_inf is None else found_inf)
    # The powers come from the function that torch's kernel calls, in fp32.
    numbers = torch.stack([number(group["lr"]), beta1**step, beta2**step, scale, skips])
    step.sub_(skips)
    update = {
        **{name: local_part(state[name]) for name in _MOMENTS[:2]},
        "grad": grad,
        "numbers": numbers,
        "beta1": beta1,
        "beta2": beta2,
        "eps": group["eps"],
        "weight_decay": group["weight_decay"],
    }
    p._quantize_into(local_part(state["master"]), None, update=update)


def _gradient(p: Tensor) -> Tensor | None:
    """Return ``main_grad`` if the gradient was accumulated there, else ``grad``."""
    main: Tensor | None = getattr(p, "main_grad", None)
    return main if main is not None and getattr(p, "grad_added_to_main_grad", False) else p.grad


def _write(p: Tensor, master: Tensor) -> None:
    if isinstance(p, GroupedTensor):
        p._quantize_into(master, p.offs)
    else:
        p.copy_(master)
