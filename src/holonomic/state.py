"""Between the optimizer's ``state`` (one dict per parameter) and a `Phase` (lists per group)."""

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from holonomic.constraints import Constraint
from holonomic.distributed import joined, local
from holonomic.errors import SettingError
from holonomic.noise import FIRST, Noise, Stream
from holonomic.phase import Phase
from holonomic.scheme import Scheme

State = MutableMapping[Tensor, Any]

#: Names in ``state``. The momentum is called as in `torch.optim.SGD`, so that its checkpoints load.
KEYS = {
    "v": "momentum_buffer",
    "xi": "slack",
    "eta": "slack_momentum",
    "R": "noise",
    "S": "slack_noise",
}
#: Those that are momenta.
MOMENTA = (KEYS["v"], KEYS["eta"])
_SLACK = ("xi", "eta", "S")


def needed(constraint: Constraint, scheme: Scheme) -> list[str]:
    """The lists of a phase that a constraint and a scheme work with, beside q."""
    lists = [name for name in constraint.lists if not (scheme.overdamped and name in ("v", "eta"))]
    if scheme.letters == "LM":
        lists += ["R", "S"] if "xi" in lists else ["R"]
    return lists


def entries(params: Sequence[Tensor], state: State) -> list[dict[str, Tensor] | None]:
    """What the optimizer holds of every parameter; None if it has never seen it."""
    return [state.get(p) for p in params]


def missing(
    held: Sequence[dict[str, Tensor] | None], constraint: Constraint, scheme: Scheme
) -> list[int]:
    """The numbers of the entries that lack something; all or none, if the constraint links them."""
    joint = constraint.grain == "group"
    lists = needed(constraint, scheme)
    keys = [KEYS[name] for name in lists if not (joint and name in _SLACK)]
    new = [i for i, e in enumerate(held) if e is None or not all(key in e for key in keys)]
    if joint and (new or any(KEYS[name] not in (held[0] or {}) for name in lists)):
        return list(range(len(held)))
    return new


def gather(
    params: Sequence[Tensor],
    held: Sequence[dict[str, Tensor] | None],
    names: Sequence[str],
    constraint: Constraint,
    scheme: Scheme,
) -> Phase:
    """The phase point of parameters that have their state; raises if the state does not fit them."""
    x = Phase([local(p) for p in params], names=list(names))
    shapes = [q.shape for q in x.q]
    for name in needed(constraint, scheme):
        key = KEYS[name]
        of_group = constraint.grain == "group" and name in _SLACK
        tensors = [local(e[key]) for e in (held[:1] if of_group else held) if e is not None]
        if name in ("v", "R") and [t.shape for t in tensors] != shapes:
            raise _misfit(key, tensors, x)
        setattr(x, name, tensors)
    if x.xi and constraint.grain != "group" and not all(map(_suits, x.xi, x.q)):
        raise _misfit(KEYS["xi"], x.xi, x)
    if x.eta and [t.shape for t in x.eta] != [t.shape for t in x.xi]:
        raise _misfit(KEYS["eta"], x.eta, x)
    return x


def _suits(xi: Tensor, q: Tensor) -> bool:
    """Whether a slack may belong to a weight: one per weight, or one per row of some dimensions."""
    if xi.shape == q.shape:
        return True
    return xi.dim() == q.dim() and all(m in (1, n) for m, n in zip(xi.shape, q.shape, strict=True))


def _misfit(key: str, tensors: list[Tensor], x: Phase) -> SettingError:
    expected = x.xi if key == KEYS["eta"] else x.q
    name, t, q = next(
        found
        for found in zip(x.names, tensors, expected, strict=True)
        if not (_suits(*found[1:]) if key == KEYS["xi"] else found[1].shape == found[2].shape)
    )
    return SettingError(
        f"{name!r} has shape {tuple(q.shape)} and its {key} in the optimizer's state has "
        f"{tuple(t.shape)}: the weight was replaced after a step. Build a new optimizer, or forget the "
        f"state by optimizer.state.pop(parameter)."
    )


def create(
    params: list[Tensor],
    names: list[str],
    constraint: Constraint,
    scheme: Scheme,
    state: State,
    noise: Noise,
    streams: Sequence[Stream],
    step: int,
) -> None:
    """Give parameters the state they lack: at rest, slack to go with the weights as they are.

    Weights changed since the optimizer was built (a model checkpoint, say) are placed again."""
    q = [p.detach() for p in params]
    parts = [local(t) for t in q]
    constraint.place_(parts, names)
    lists = needed(constraint, scheme)
    xi = constraint.slacks(parts, open=True) if "xi" in lists else []
    xi = [joined(t, p) for t, p in zip(xi, params, strict=False)]  # one may serve a whole group
    fresh = {"v": [torch.zeros_like(t, memory_format=torch.preserve_format) for t in q]}
    fresh.update(xi=xi, eta=[torch.zeros_like(t) for t in xi])
    if "R" in lists:
        for name, like, slot in (("R", q, FIRST), ("S", xi, FIRST + 1)):
            pairs = zip(like, streams, strict=False)  # one slack may serve a whole group
            fresh[name] = [noise.like(t, stream, step, slot) for t, stream in pairs]
    for p in params:
        state.setdefault(p, {})
    for name in lists:
        for p, t in zip(params, fresh[name], strict=False):  # a group's slack belongs to its first
            state[p].setdefault(KEYS[name], t)
