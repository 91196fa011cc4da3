"""Optimizer state by the names of its parameters, so that it fits an optimizer that has them in another order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_hetckpt.errors import CheckpointError

KEY = "parameter_names"  # of a checkpoint: for each optimizer its parameters' names in one text, a line each

# What wrappers put between the names of modules.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def parameter_names(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of the optimizer's parameters in the order in which its state counts them.

    Raises:
        CheckpointError: a parameter that `module` does not have.
    """
    names = {id(parameter): _plain(name) for name, parameter in module.named_parameters()}
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    strangers = [at for at, one in enumerate(parameters) if id(one) not in names]
    if strangers:
        raise CheckpointError(
            f"parameter {strangers[0]} of {type(optimizer).__name__} is none of {type(module).__name__}; its state "
            "cannot be matched by name."
        )
    return [names[id(one)] for one in parameters]


def by_name(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """An `Optimizer.state_dict()` with names for numbers, as `get_optimizer_state_dict` of torch gives it.

    Raises:
        CheckpointError: `names` are too few.
    """
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if any(not isinstance(number, int) or number >= len(names) for number in numbers):
        raise CheckpointError(
            f"{len(names)} names of parameters for an optimizer state that has {len(numbers)}."
        )
    return {
        "state": {names[number]: value for number, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def is_by_name(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer state counts its parameters by name already."""
    return any(isinstance(key, str) for group in state["param_groups"] for key in group["params"])


def by_number(state: Mapping[str, Any], names: Sequence[str], sizes: Sequence[int]) -> dict[str, Any]:
    """A state by name as `Optimizer.load_state_dict` takes it.

    Args:
        names: what the optimizer's parameters are called, in its order.
        sizes: how many of them are in each of its groups. A group takes its options from the saved group that
            held its first parameter.

    Raises:
        CheckpointError: lists the parameters that the state does not know.
    """
    home = {name: group for group in state["param_groups"] for name in group["params"]}
    missing = [name for name in names if name not in home]
    if missing:
        raise CheckpointError(
            f"the saved optimizer state lacks {len(missing)} of {len(names)} parameters: {', '.join(missing[:20])}"
        )
    groups, start = [], 0
    for size in sizes:
        options = home[names[start]] if size else {}
        groups.append({**options, "params": list(range(start, start + size))})
        start += size
    return {
        "state": {
            number: state["state"][name] for number, name in enumerate(names) if name in state["state"]
        },
        "param_groups": groups,
    }


def spelled(names: Sequence[str]) -> str:
    """One text for all names, which costs a snapshot next to nothing."""
    return "\n".join(names)


def saved_names(checkpoint: Mapping[str, Any], number: int) -> list[str] | None:
    """The names that were saved for the optimizer `number`; None where there are none."""
    texts = checkpoint.get(KEY)
    if not isinstance(texts, list) or number >= len(texts) or not isinstance(texts[number], str):
        return None
    return str(texts[number]).split("\n")


def fitted(
    state: Mapping[str, Any], saved: Sequence[str] | None, names: Sequence[str], sizes: Sequence[int]
) -> Mapping[str, Any]:
    """`state` for an optimizer that calls its parameters `names`, however it was saved.

    Where the saved names do not include all of these, or none were saved, the order has to do, as in stock torch.
    """
    if is_by_name(state):
        return by_number(state, names, sizes)
    if saved is None or not set(names) <= set(saved):
        return state
    if list(saved) == list(names) and list(sizes) == [
        len(group["params"]) for group in state["param_groups"]
    ]:
        return state
    return by_number(by_name(state, saved), names, sizes)


def group_sizes(optimizer: Optimizer) -> list[int]:
    """How many parameters each of its groups has."""
    return [len(group["params"]) for group in optimizer.param_groups]


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
