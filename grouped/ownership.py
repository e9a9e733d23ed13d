"""Owners of parameters: code elsewhere that shards, moves, shares or computes a module's weight.

If a weight is replaced without its owner, the new weight is lost: FSDP2 puts its own tensor back at
the next call, an optimizer continues with the old one. Functions that replace weights ask
``Ownership`` before they change anything, and ``retire`` the old parameters afterwards:

    Ownership(model).check_replaceable([(layer, "weight")], "prepare()")
    old, layer.weight = layer.weight, nn.Parameter(new)
    retire([old], "prepare()")

Owners are recognized by attributes and by modules that are imported already, so nothing here
imports ``torch.distributed``, peft or accelerate. Two owners cannot be recognized here and raise
later. An optimizer raises at its next step (``retire``). ``DistributedDataParallel`` raises at its
second forward pass, if the module is passed without that wrapper.
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
from .tracing import eager_only

#: A parameter by the module that holds it, and its name there.
Target: TypeAlias = tuple[nn.Module, str]


class Owner(NamedTuple):
    """Code that manages a parameter.

    Attributes:
        kind: A key of ``RULES``.
        rule: Reason why the parameter cannot be replaced.
        advice: What the user can do instead.
        manager: Object that manages it, such as FSDP2's ``FSDPParam``, or None.
    """

    kind: str
    rule: str
    advice: str
    manager: Any = None


#: Rule and advice for each kind of owner. ``Ownership.owner`` or ``_parameter_kind`` recognizes it.
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
        "Merge the adapter first (merge_and_unload), or let it target other modules, such as "
        "attention",
    ),
    "accelerate": (
        "a hook of accelerate offloads it, and loads the old values again at the next call",
        "Do it before the model is dispatched or offloaded; cpu_offload takes quantized weights "
        "afterwards. "
        "Or remove the hooks first: accelerate.hooks.remove_hook_from_submodules",
    ),
    "computed": (
        "it is not a parameter of this module, which computes it or takes it from elsewhere",
        "Make it a parameter of the module first",
    ),
    "meta": (
        "it is on the meta device, without values",
        "Build the model on its device, or load the values first, as by "
        "load_state_dict(assign=True) or grouped.checkpoint.load(model, folder, device=...)",
    ),
    "bitsandbytes": (
        "bitsandbytes holds it in codes of its own (load_in_4bit, load_in_8bit)",
        "Leave the experts out of its quantization, as by llm_int8_skip_modules, or load the "
        "model without it",
    ),
    "subclass": (
        "another library's tensor class holds it",
        "Load the model with plain weights, in bfloat16, float16 or float32",
    ),
    "hooked": (
        "a hook on its gradient (register_hook, register_post_accumulate_grad_hook) would stay "
        "with the old one",
        "Register hooks afterwards, on the new parameter",
    ),
    "tied": (
        "other modules share it, and would keep the old one",
        "Untie it first, by a parameter of its own for each module",
    ),
}
#: Kinds whose parameters do not contain their values, so that they cannot be written either.
UNFILLABLE = frozenset(
    {"fsdp1", "deepspeed", "accelerate", "parametrize", "computed", "bitsandbytes"}
)
#: Kinds by the name of a parameter's class, so that its library need not be imported.
_CLASSES = {"Params4bit": "bitsandbytes", "Int8Params": "bitsandbytes"}
_PLAIN = (Tensor, nn.Parameter)


def _owner(kind: str, manager: Any = None) -> Owner:
    return Owner(kind, *RULES[kind], manager)


class Ownership:
    """Owners of all parameters under ``root``, found in one walk over its modules."""

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
        """Return the name of a parameter as in ``root.state_dict()``.

        The class of the module stands for its path if the module is not under ``root``.
        """
        return f"{self._paths.get(id(module), type(module).__name__)}.{name}".lstrip(".")

    def owner(self, module: nn.Module, name: str, together: Iterable[Target] = ()) -> Owner | None:
        """Return the owner of a parameter, or None if the module alone has it.

        Args:
            module: The module that holds the parameter.
            name: Its name there.
            together: All parameters that are replaced at once; they may be tied to each other.
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
        kind = _parameter_kind(parameter)
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
            targets: Modules under the root, and the names of their parameters.
            purpose: Name of the caller, such as ``"prepare()"``, for the message.
            allow: Kinds of owners, keys of ``RULES``, that the caller handles.

        Raises:
            ValueError: A parameter has an owner; the message names the parameter, the owner and an
                alternative.
        """
        targets, allow = list(targets), set(allow)
        for module, name in targets:
            owner = self.owner(module, name, targets)
            if owner is not None and owner.kind not in allow:
                raise ValueError(
                    f"{purpose} cannot replace {self.path(module, name)}: {owner.rule}. "
                    f"{owner.advice}"
                )

    def is_shared(self, parameter: Tensor) -> bool:
        """Return True if the parameter has several names under ``root``."""
        return len(self._holders.get(id(parameter), ())) > 1

    def has_other_holder(
        self, module: nn.Module, name: str, together: Iterable[Target] = ()
    ) -> bool:
        """Return True if a module has the parameter under a name that is not replaced with it.

        The parameter may be a DTensor.
        """
        holders = self._holders.get(id(module._parameters.get(name)), ())
        names = {(id(holder), key) for holder, key in holders} - {(id(module), name)}
        return bool(names) and not names <= {(id(holder), key) for holder, key in together}


class FsdpWatch:
    """Check of parameters that are assigned to a module whose parameters FSDP2 shards.

    FSDP2 assigns its own tensors at each call, so the managers are cached; it never notices other
    tensors.
    """

    def __init__(self) -> None:
        self._managers: dict[str, Any] = {}

    def check(self, module: nn.Module, name: str, value: Any) -> None:
        """Raise unless FSDP2, if it shards the parameter ``name``, may take ``value`` in its place.

        Raises:
            ValueError: ``value`` is not a DTensor, so that FSDP2 would drop it.
            RuntimeError: FSDP2 gathers the parameter, and would drop a DTensor that was
                assigned before.
        """
        manager = self._managers.get(name)
        if manager is None or not any(value is t for t in _tensors_of(manager)):
            manager = next(
                (candidate for candidate, key in _fsdp_parameters() if key == (id(module), name)),
                None,
            )
            if manager is None:
                return
            self._managers[name] = manager
        sharded, gathered, between = _tensors_of(manager)
        if value is gathered:
            present = module._parameters.get(name)
            if not any(present is t for t in (sharded, gathered, between)):
                raise RuntimeError(
                    f"{type(module).__name__}.{name} was replaced, but FSDP2 (fully_shard) goes on "
                    "with its own tensor: copy_() into the parameter, or replace it before "
                    "fully_shard"
                )
        elif not hasattr(value, "_local_tensor"):
            # FSDP2 accepts a DTensor, as load_state_dict(assign=True) assigns it.
            rule, advice = RULES["fsdp"]
            raise ValueError(f"{type(module).__name__}.{name} cannot be assigned: {rule}. {advice}")


def _tensors_of(manager: Any) -> tuple[Any, ...]:
    """Return the tensors that FSDP2 sets as a parameter.

    They are the shard, the gathered tensor, and the tensor between forward and backward.
    """
    between = getattr(manager, "_sharded_post_forward_param", None)
    return manager.sharded_param, getattr(manager, "_unsharded_param", None), between


# ---- parameters that were replaced

#: Attributes with the name of the function that replaced or wrote a parameter. Not weak references:
#: torch.utils.swap_tensors, which Module.to() uses for DTensors and GroupedTensors, refuses tensors
#: that have some.
_REPLACED_BY, _WRITTEN_BY = "_replaced_by", "_written_by"


def retire(parameters: Iterable[Tensor], purpose: str) -> None:
    """Make every optimizer that has one of these replaced parameters raise at its next step.

    A step would update tensors that no module reads.
    """
    _watch_optimizers()
    for p in parameters:
        p.__dict__[_REPLACED_BY] = purpose


def refill(parameters: Iterable[Tensor], purpose: str) -> None:
    """Make an optimizer with an outdated master of a written parameter raise at its next step.

    A step would put the master's old values back. Optimizers whose masters have the new values
    continue: those that are made afterwards, or load a state that belongs to the values.
    """
    _watch_optimizers()
    for p in parameters:
        p.__dict__[_WRITTEN_BY] = purpose


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_check_parameters)


def _check_parameters(optimizer: Optimizer, *_: Any) -> None:
    """Raise if an optimizer would update replaced parameters, or put old values back.

    Dynamo traces this loop with compiled steps and guards on the attributes, so that graphs break
    only where a parameter has one.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if hasattr(p, _REPLACED_BY) or hasattr(p, _WRITTEN_BY):
                _check_notes(optimizer)
                return


@eager_only("the notes of replaced and written parameters are read from their __dict__")
def _check_notes(optimizer: Optimizer) -> None:
    """Do what ``_check_parameters`` says, for parameters that were replaced or written."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        notes = p.__dict__
        if purpose := notes.get(_REPLACED_BY):
            raise RuntimeError(
                f"{type(optimizer).__name__} holds {_describe(optimizer, p)} that {purpose} "
                "replaced: a step would not change the model. Make the optimizer after "
                f"{purpose}"
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
            f"{type(optimizer).__name__} has a master of {_describe(optimizer, p)} that {purpose} "
            "wrote: a step would put the old values back. Make the optimizer afterwards, or load "
            "the optimizer's state as well"
        )


def _describe(optimizer: Optimizer, parameter: Tensor) -> str:
    """Return the name of a parameter, if the optimizer has names, else its index; and its shape."""
    for number, group in enumerate(optimizer.param_groups):
        for index, p in enumerate(group["params"]):
            if p is parameter:
                names = group.get("param_names")
                name = repr(names[index]) if names else f"{index} of param_groups[{number}]"
                return f"parameter {name} of shape {tuple(p.shape)}"
    return f"a parameter of shape {tuple(parameter.shape)}"


def _has_old_master(state: dict[str, Any], p: Tensor) -> bool:
    """Return True if an optimizer has stepped, and its master does not round to the values."""
    if "master" not in state or "step" not in state:
        return False
    rounded = p.detach().clone().copy_(local_part(state["master"]).view(p.shape))
    rounded, values = (
        t.dequantize() if isinstance(t, GroupedTensor) else t for t in (rounded, p.detach())
    )
    return not torch.equal(rounded, values)


# ---- recognition of owners


def _parameter_kind(parameter: Any) -> str | None:
    """Return the kind of owner that the parameter itself shows, or None."""
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
    """Yield the states of ``fully_shard`` in this process, for modules under any root."""
    module = sys.modules.get("torch.distributed._composable_state")
    states = (
        []
        if module is None
        else [reference() for reference in list(module._module_state_mapping.values())]
    )
    return iter({id(state): state for state in states if state is not None}.values())


def _fsdp_parameters() -> Iterator[tuple[Any, tuple[int, str]]]:
    """Yield each parameter that FSDP2 manages, and the module and name under which it is set."""
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
    """Yield the ids of parameters of ``DistributedDataParallel`` or ``replicate``."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        yield from map(id, module.parameters())
    contract = sys.modules.get("torch.distributed._composable.contract")
    states = {} if contract is None else module.__dict__.get(contract.STATE_KEY, {})
    for state in states.values():
        yield from map(id, getattr(state, "_param_list", ()))


def _offload_hook(module: nn.Module) -> Any:
    """Return the hook of accelerate that offloads the module's weights between calls, or None."""
    hook: Any = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", [hook])
    return next((h for h in hooks if getattr(h, "offload", False) is True), None)


def _adapted_parameters(module: nn.Module) -> Iterator[tuple[int, str]]:
    """Yield the parameters that a layer of PEFT adds to, or has a trained copy of."""
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
