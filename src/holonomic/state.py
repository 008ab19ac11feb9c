"""Between the optimizer's ``state`` (a dict a parameter) and a `Phase` (lists a group)."""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from holonomic.constraints import Constraint
from holonomic.noise import Noise
from holonomic.phase import Phase, draw
from holonomic.scheme import Scheme

State = MutableMapping[Tensor, Any]

#: Names in ``state``; the slack's is the constraint's. The momentum is called as in `torch.optim.SGD`, so
#: that its checkpoints load.
KEYS = {
    "v": "momentum_buffer",
    "eta": "slack_momentum",
    "R": "noise",
    "S": "slack_noise",
}
_SLACK = ("xi", "eta", "S")


def needed(constraint: Constraint, scheme: Scheme) -> list[str]:
    """The lists of a phase that a constraint and a scheme work with, beside q."""
    lists = [] if scheme.overdamped else ["v"]
    if constraint.has_slack:
        lists.append("xi")
        if constraint.slack_momentum and not scheme.overdamped:
            lists.append("eta")
    if scheme.letters == "LM":
        lists += ["R", "S"] if constraint.has_slack else ["R"]
    return lists


def _key(name: str, constraint: Constraint) -> str:
    return constraint.slack_name if name == "xi" else KEYS[name]


def missing(
    params: list[Tensor], constraint: Constraint, scheme: Scheme, state: State
) -> list[Tensor]:
    """The parameters that have no (or not all) state yet.

    One that needs none has an empty entry: distributed checkpoints ask for one a parameter."""
    keys = [(name, _key(name, constraint)) for name in needed(constraint, scheme)]
    new = []
    for i, p in enumerate(params):
        held = state.get(p)
        if held is None:
            new.append(p)
            continue
        for name, key in keys:
            if key not in held and not (constraint.joint and i and name in _SLACK):
                new.append(p)
                break
    return new


def gather(
    params: list[Tensor], names: list[str], constraint: Constraint, scheme: Scheme, state: State
) -> Phase:
    """The phase point of parameters that have their state."""
    x = Phase([p.detach() for p in params], names=names)
    for name in needed(constraint, scheme):
        holders = params[:1] if constraint.joint and name in _SLACK else params
        key = _key(name, constraint)
        setattr(x, name, [state[p][key] for p in holders])
    return x


def create(
    params: list[Tensor],
    names: list[str],
    constraint: Constraint,
    scheme: Scheme,
    state: State,
    noise: Noise,
) -> None:
    """Give parameters the state they lack: at rest, slack to go with the weights as they are.

    Weights changed since the optimizer was built (a model checkpoint, say) are placed again."""
    q = [p.detach() for p in params]
    constraint.place_(q, names)
    xi = constraint.slacks(q)
    constraint.unstick_(xi)
    fresh = {"v": [torch.zeros_like(t, memory_format=torch.preserve_format) for t in q]}
    fresh.update(xi=xi, eta=[torch.zeros_like(t) for t in xi])
    lists = needed(constraint, scheme)
    for p in params:
        state.setdefault(p, {})
    if "R" in lists:
        # Kept beyond this step: a copy, because a source may hand out parts of its own buffer.
        fresh["R"], fresh["S"] = ([t.clone() for t in ts] for ts in draw(q, xi, noise))
    for name in lists:
        for p, t in zip(params, fresh[name], strict=False):  # joint slack belongs to the first
            state[p].setdefault(_key(name, constraint), t)
