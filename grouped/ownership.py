"""Owners of parameters: code elsewhere that shards, moves, shares or computes a module's weight.

A weight that is replaced behind the back of its owner is lost: FSDP2 puts its own tensor back at the
next call, an optimizer goes on with the old one. Functions that replace weights ask
``Ownership`` before they change anything, and ``retire`` the old parameters afterwards::

  Ownership(model).check_replaceable([(layer, "weight")], "prepare()")
  old, layer.weight = layer.weight, nn.Parameter(new)
  retire([old], "prepare()")

Owners are recognized by attributes and by modules that are imported already, so that asking costs
no import of ``torch.distributed``, peft or accelerate. Two owners cannot be seen from here, and are
caught
later: an optimizer raises at its next step (``retire``), and ``DistributedDataParallel`` around a
module that is passed without the wrapper raises at its second forward pass.
"""

import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .tensor.dtensor_parts import local_part
from .tensor.grouped_tensor import GroupedTensor

#: A parameter by the module that holds it, and its name there.
Target: TypeAlias = tuple[nn.Module, str]


class Owner(NamedTuple):
    """Code that manages a parameter.

    Attributes:
        kind: a key of ``RULES``.
        rule: why the parameter cannot be replaced.
        advice: a way out.
        manager: the object that manages it, such as FSDP2's ``FSDPParam``; None where there is
            none.
    """

    kind: str
    rule: str
    advice: str
    manager: Any = None


#: The rule and the way out of each kind of owner. A new kind is recognized in ``Ownership.owner``
#: or in ``_kind_of``.
RULES: dict[str, tuple[str, str]] = {
    "fsdp": (
        "FSDP2 (fully_shard) shards it, and puts its own tensor back at the next call",
        "Do it before fully_shard: FSDP2 shards quantized weights by whole groups",
    ),
    "fsdp1": (
        "FullyShardedDataParallel keeps it in a flat parameter",
        "Do it before you shard, and shard by fully_shard (FSDP2), which takes quantized weights",
    ),
    "deepspeed": ("DeepSpeed's ZeRO partitions it", "Do it before deepspeed.initialize"),
    "dtensor": (
        "it is a DTensor: expert or tensor parallelism spreads it over ranks",
        "Do it before the model is parallelized, as by parallelize_module or distribute_tensor",
    ),
    "ddp": (
        "DistributedDataParallel reduces the gradient of the parameter that it was made with",
        "Do it before DistributedDataParallel wraps the model",
    ),
    "parametrize": (
        "torch.nn.utils.parametrize computes it from another parameter",
        "Remove the parametrization first: parametrize.remove_parametrizations",
    ),
    "peft": (
        "a PEFT adapter adds to it (target_parameters, modules_to_save)",
        "Merge the adapter first (merge_and_unload), or let it target other modules, such as attention",
    ),
    "accelerate": (
        "a hook of accelerate offloads it, and loads the old values again at the next call",
        "Do it before the model is dispatched or offloaded; cpu_offload takes quantized weights afterwards. "
        "Or remove the hooks first: accelerate.hooks.remove_hook_from_submodules",
    ),
    "computed": (
        "it is no parameter of this module, which computes it or takes it from elsewhere",
        "Make it a parameter of the module first",
    ),
    "meta": (
        "it is on the meta device, without values",
        "Load its values first, as by load_state_dict(assign=True) or to_empty and a checkpoint",
    ),
    "bitsandbytes": (
        "bitsandbytes holds it in codes of its own (load_in_4bit, load_in_8bit)",
        "Leave the experts out of its quantization, as by llm_int8_skip_modules, or load the model without it",
    ),
    "subclass": (
        "another library's tensor class holds it",
        "Load the model with plain weights, in bfloat16, float16 or float32",
    ),
    "hooked": (
        "a hook on its gradient (register_hook, register_post_accumulate_grad_hook) would stay with the old one",
        "Register hooks afterwards, on the new parameter",
    ),
    "tied": (
        "other modules share it, and would keep the old one",
        "Untie it first, by a parameter of its own for each module",
    ),
}
#: Kinds whose parameters do not hold their values, so that nothing can be written into them either.
UNFILLABLE = frozenset(
    {"fsdp1", "deepspeed", "accelerate", "parametrize", "computed", "bitsandbytes"}
)
#: Kinds by the name of a parameter's class, where its library may not be imported for the question.
_CLASSES = {"Params4bit": "bitsandbytes", "Int8Params": "bitsandbytes"}
_PLAIN = (Tensor, nn.Parameter)


def _owner(kind: str, manager: Any = None) -> Owner:
    return Owner(kind, *RULES[kind], manager)


class Ownership:
    """The owners of all parameters under ``root``, found in one walk over its modules."""

    def __init__(self, root: nn.Module) -> None:
        self._paths: dict[int, str] = {}
        self._sharded = {key: manager for manager, key in _fsdp_parameters()}
        self._reduced = set[int]()
        self._offloaded: set[int] = set()
        self._adapted: set[tuple[int, str]] = set()
        self._holders: dict[int, list[Target]] = {}
        for path, module in root.named_modules():
            self._paths[id(module)] = path
            self._reduced.update(_reduced_parameters(module))
            self._adapted.update(_adapted_parameters(module))
            if (hook := _offload_hook(module)) is not None:
                self._offloaded.update(
                    map(id, module.modules() if hook.place_submodules else [module])
                )
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._holders.setdefault(id(parameter), []).append((module, name))

    def path(self, module: nn.Module, name: str) -> str:
        """Name of a parameter as in ``root.state_dict()``; by the class of its module if that is
        not under ``root``.
        """
        return f"{self._paths.get(id(module), type(module).__name__)}.{name}".lstrip(".")

    def owner(self, module: nn.Module, name: str, together: Iterable[Target] = ()) -> Owner | None:
        """Return the owner of a parameter, or None if the module alone has it.

        Args:
            module: the module that holds the parameter.
            name: its name there.
            together: all parameters that are replaced at once: those may be tied to each other.
        """
        key = (id(module), name)
        if key in self._sharded:
            return _owner("fsdp", self._sharded[key])
        if name in getattr(module, "parametrizations", ()):
            return _owner("parametrize")
        if key in self._adapted:
            return _owner("peft")
        parameter = module._parameters.get(name)
        if parameter is None:
            return _owner("computed")
        kind = _kind_of(parameter)
        if kind in ("meta", None) and id(module) in self._offloaded:
            kind = "accelerate"
        if kind in ("hooked", None) and id(parameter) in self._reduced:
            kind = "ddp"
        if kind is None and self.has_other_holder(module, name, together):
            kind = "tied"
        return None if kind is None else _owner(kind)

    def check_replaceable(
        self, targets: Iterable[Target], purpose: str, allow: Iterable[str] = ()
    ) -> None:
        """Raise unless each of ``targets`` can be replaced by another parameter.

        Parameters that are tied to each other pass if all of them are targets; the caller must tie
        them again.

        Args:
            targets: modules under the root, and the names of their parameters.
            purpose: what is done, such as ``"prepare()"``, for the message.
            allow: kinds of owners, keys of ``RULES``, that the caller handles.

        Raises:
            ValueError: a parameter has an owner; the message names parameter, owner and a way
                out.
        """
        targets, allow = list(targets), set(allow)
        for module, name in targets:
            owner = self.owner(module, name, targets)
            if owner is not None and owner.kind not in allow:
                raise ValueError(
                    f"{purpose} cannot replace {self.path(module, name)}: {owner.rule}. {owner.advice}"
                )

    def is_shared(self, parameter: Tensor) -> bool:
        """Tell whether the parameter has several names under ``root``."""
        return len(self._holders.get(id(parameter), ())) > 1

    def has_other_holder(
        self, module: nn.Module, name: str, together: Iterable[Target] = ()
    ) -> bool:
        """Tell whether a module has the parameter under a name that is not replaced with it; also
        of a DTensor.
        """
        holders = self._holders.get(id(module._parameters.get(name)), ())
        names = {(id(holder), key) for holder, key in holders} - {(id(module), name)}
        return bool(names) and not names <= {(id(other), key) for other, key in together}


class FsdpWatch:
    """Refusal of parameters that are assigned to a module whose own FSDP2 shards.

    FSDP2 assigns its own tensors at each call, so that the answer is kept; it finds others at no
    time.
    """

    def __init__(self) -> None:
        self._managers: dict[str, Any] = {}

    def check(self, module: nn.Module, name: str, value: Any) -> None:
        """Raise unless FSDP2, if it shards the parameter ``name``, may take ``value`` in its place.

        Raises:
            ValueError: ``value`` is no DTensor, so that FSDP2 would drop it.
            RuntimeError: FSDP2 gathers the parameter, and would drop a DTensor that was
                assigned before.
        """
        manager = self._managers.get(name)
        if manager is None or not any(value is t for t in _tensors_of(manager)):
            manager = next(
                (found for found, key in _fsdp_parameters() if key == (id(module), name)), None
            )
            if manager is None:
                return
            self._managers[name] = manager
        sharded, gathered, between = _tensors_of(manager)
        if value is gathered:
            present = module._parameters.get(name)
            if not any(present is t for t in (sharded, gathered, between)):
                raise RuntimeError(
                    f"{type(module).__name__}.{name} was replaced, but FSDP2 (fully_shard) goes on with its own tensor: copy_() "
                    "into the parameter, or replace it before fully_shard"
                )
        elif not hasattr(
            value, "_local_tensor"
        ):  # FSDP2 takes a DTensor of load_state_dict(assign=True).
            rule, advice = RULES["fsdp"]
            raise ValueError(f"{type(module).__name__}.{name} cannot be assigned: {rule}. {advice}")


def _tensors_of(manager: Any) -> tuple[Any, ...]:
    """The tensors that FSDP2 sets as a parameter: the shard, what was gathered, and what lies
    between calls.
    """
    between = getattr(manager, "_sharded_post_forward_param", None)
    return manager.sharded_param, getattr(manager, "_unsharded_param", None), between


# ---- parameters that were replaced

#: Attributes of parameters that were replaced, and of those that were written: the function that
#: did it. No weak references: torch.utils.swap_tensors, used by Module.to() for DTensors and
#: GroupedTensors, refuses those with any.
_REPLACED_BY, _WRITTEN_BY = "_replaced_by", "_written_by"


def retire(parameters: Iterable[Tensor], purpose: str) -> None:
    """Have every optimizer that holds one of these replaced parameters raise at its next step.

    A step would update tensors that no module reads.
    """
    _watch_optimizers()
    for p in parameters:
        p.__dict__[_REPLACED_BY] = purpose


def refill(parameters: Iterable[Tensor], purpose: str) -> None:
    """Have an optimizer that has a master of one of these parameters, which were written, raise at
    its next step.

    A step would put the master's old values back. Optimizers whose masters have the new values go
    on: those that are made afterwards, or get a state that belongs to the values.
    """
    _watch_optimizers()
    for p in parameters:
        p.__dict__[_WRITTEN_BY] = purpose


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_check_parameters)


def _check_parameters(optimizer: Optimizer, *_: Any) -> None:
    """Raise for an optimizer that would change parameters that no module reads, or put old values
    back.
    """
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        notes = p.__dict__
        if purpose := notes.get(_REPLACED_BY):
            raise RuntimeError(
                f"{type(optimizer).__name__} holds a parameter of shape {tuple(p.shape)} that {purpose} replaced: a step "
                f"would not change the model. Make the optimizer after {purpose}"
            )
        if purpose := notes.get(_WRITTEN_BY):
            check_master(optimizer, p, purpose)
            del notes[_WRITTEN_BY]


def check_master(optimizer: Optimizer, p: Tensor, purpose: str) -> None:
    """Raise if a parameter that ``purpose`` wrote has a master with other values.

    Reads values on the device.
    """
    if _has_old_master(optimizer.state.get(p, {}), local_part(p)):
        raise RuntimeError(
            f"{type(optimizer).__name__} has a master of a parameter of shape {tuple(p.shape)} that {purpose} wrote: "
            f"a step would put the old values back. Make the optimizer after {purpose}"
        )


def _has_old_master(state: dict[str, Any], part: Tensor) -> bool:
    """Tell whether an optimizer has stepped, and its master does not round to the values of
    ``part``.
    """
    if "master" not in state or "step" not in state:
        return False
    rounded = part.detach().clone().copy_(local_part(state["master"]).view(part.shape))
    return not torch.equal(
        *(t.dequantize() if isinstance(t, GroupedTensor) else t for t in (rounded, part.detach()))
    )


# ---- how owners are recognized


def _kind_of(parameter: Any) -> str | None:
    """The kind of owner that the parameter itself shows."""
    if hasattr(parameter, "_local_tensor"):
        return "dtensor"
    if getattr(parameter, "_fsdp_flattened", False):
        return "fsdp1"
    if hasattr(parameter, "ds_id"):
        return "deepspeed"
    if parameter.is_meta:
        return "meta"
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return "hooked"
    is_known = type(parameter) in _PLAIN or isinstance(parameter, GroupedTensor)
    if is_known or type(parameter).__name__ == "FakeTensor":
        return None
    return next(
        (_CLASSES[c.__name__] for c in type(parameter).__mro__ if c.__name__ in _CLASSES),
        "subclass",
    )


def _composable_states() -> Iterator[Any]:
    """States of ``fully_shard`` in this process, also those of modules outside of a root."""
    module = sys.modules.get("torch.distributed._composable_state")
    states = (
        []
        if module is None
        else [reference() for reference in list(module._module_state_mapping.values())]
    )
    return iter({id(state): state for state in states if state is not None}.values())


def _fsdp_parameters() -> Iterator[tuple[Any, tuple[int, str]]]:
    """Each parameter that FSDP2 manages, with the module and name under which it is set."""
    for state in _composable_states():
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [
                group for group in [getattr(state, "_fsdp_param_group", None)] if group is not None
            ]
        for manager in (p for group in groups for p in group.fsdp_params):
            info = manager._module_info
            for module, name in zip(
                [info.module, *info.shared_modules],
                [info.param_name, *info.shared_param_names],
                strict=True,
            ):
                yield manager, (id(module), name)


def _reduced_parameters(module: nn.Module) -> Iterator[int]:
    """Parameters of a ``DistributedDataParallel``, or of ``replicate``, whose state the module
    keeps.
    """
    if isinstance(module, nn.parallel.DistributedDataParallel):
        yield from map(id, module.parameters())
    contract = sys.modules.get("torch.distributed._composable.contract")
    states = {} if contract is None else module.__dict__.get(contract.STATE_KEY, {})
    for state in states.values():
        yield from map(id, getattr(state, "_param_list", ()))


def _offload_hook(module: nn.Module) -> Any:
    """The hook of accelerate that keeps the module's weights elsewhere between calls."""
    hook: Any = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", [hook])
    return next((h for h in hooks if getattr(h, "offload", False) is True), None)


def _adapted_parameters(module: nn.Module) -> Iterator[tuple[int, str]]:
    """Parameters that a layer of PEFT adds to, or has a trained copy of."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is not None and isinstance(module, tuners.BaseTunerLayer):
        base: Any = module.get_base_layer()  # type: ignore[operator]
        name = getattr(module, "parameter_name", None)
        for key in [name] if name is not None else list(base._parameters):
            yield id(base), key
    wrappers = sys.modules.get("peft.utils.other")
    if wrappers is not None and isinstance(module, getattr(wrappers, "ModulesToSaveWrapper", ())):
        for inner in module.modules():
            yield from ((id(inner), key) for key in inner._parameters)
