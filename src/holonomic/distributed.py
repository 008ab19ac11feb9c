"""Several processes: what is right stays, what would be silently wrong is refused with the reason.

A distributed tensor (DTensor: FSDP2, tensor parallelism) is whole to look at, and every process holds a
part of it. Steps work on the parts; whatever is decided or measured is put together over the processes.
"""

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from holonomic.constraints import Circle, Constraint, Sphere
from holonomic.errors import ConstraintError, HolonomicError, SettingError
from holonomic.scheme import parse

Group = dict[str, Any]
#: How long processes wait for each other where one of them may have been left out by mistake.
PATIENCE = timedelta(seconds=60)


def processes() -> int:
    """How many processes train together, as far as torch knows."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


# ---------------------------------------------------------------------- distributed tensors
_WHOLE = (Tensor, torch.nn.Parameter)  # the usual types, told apart at once


def is_distributed(t: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which every process holds a part."""
    return hasattr(t, "_local_tensor") and hasattr(t, "placements")


def local(t: Tensor) -> Tensor:
    """The numbers of this process: of a distributed tensor its own part, sharing memory."""
    return t if type(t) in _WHOLE else getattr(t, "_local_tensor", t)


def placed(grad: Any, p: Any) -> Tensor:
    """A gradient that lies on the processes as its parameter does (tensor parallelism may leave sums to
    be taken)."""
    if type(grad) not in _WHOLE and is_distributed(grad) and grad.placements != p.placements:
        return grad.redistribute(p.device_mesh, p.placements)
    return grad


def joined(part: Tensor, p: Any) -> Tensor:
    """What this process computed, entry by entry or row by row, from its part of a parameter: a part of
    a tensor that is distributed like the parameter."""
    if not is_distributed(p):
        return part
    from torch.distributed.tensor import DTensor

    own = zip(p.shape, part.shape, local(p).shape, strict=True)
    shape = torch.Size(whole if m == n else m for whole, m, n in own)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, p.device_mesh, p.placements, shape=shape, stride=stride)


def anywhere(found: bool, tensors: Iterable[Tensor]) -> bool:
    """Whether something was found by any process that holds a part of these tensors."""
    return largest([float(found)], tensors)[0] > 0


def largest(values: Sequence[float], tensors: Iterable[Tensor]) -> list[float]:
    """The largest of every value over the processes that hold parts of these tensors; NaN wins."""
    meshes = _meshes(tensors)
    if not meshes:
        return list(values)
    nan = [math.isnan(v) for v in values]
    known = [-math.inf if bad else v for v, bad in zip(values, nan, strict=True)]
    sent = torch.tensor([known, nan], dtype=torch.float64)
    for mesh in meshes:
        sent = _reduced(sent, mesh, range(mesh.ndim), "MAX")
    return [math.nan if bad else v for v, bad in zip(*sent.tolist(), strict=True)]


def summed(values: Sequence[Tensor], tensors: Sequence[Any]) -> float:
    """The sum of numbers, one for this process's part of each tensor, over all parts; copies count once."""
    whole = 0.0
    parts: dict[Any, list[float]] = {}
    for value, t in zip(values, tensors, strict=True):
        if is_distributed(t):
            cut = (d for d, how in enumerate(t.placements) if not how.is_replicate())
            parts.setdefault((t.device_mesh, *cut), []).append(float(value))
        else:
            whole += float(value)
    for (mesh, *cut), numbers in parts.items():
        sent = torch.tensor(math.fsum(numbers), dtype=torch.float64)
        whole += _reduced(sent, mesh, cut, "SUM").item()
    return whole


def meet(tensors: Iterable[Tensor], what: str) -> None:
    """Wait for the processes that hold parts of these tensors; raise if one does not come."""
    for mesh in _meshes(tensors):
        for d in range(mesh.ndim):
            sent = torch.zeros(1, device=mesh.device_type)
            work = dist.all_reduce(sent, group=mesh.get_group(d), async_op=True)
            _await(work, f"{what} puts parts of distributed tensors together: call it on all ranks")


def _meshes(tensors: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(t.device_mesh for t in tensors if is_distributed(t)))


def _reduced(t: Tensor, mesh: Any, dims: Iterable[int], operation: str) -> Tensor:
    t = t.to(mesh.device_type)
    for d in dims:
        dist.all_reduce(t, getattr(dist.ReduceOp, operation), group=mesh.get_group(d))
    return t


@contextmanager
def together(
    tensors: Iterable[Tensor], kind: type[HolonomicError] = ConstraintError
) -> Iterator[None]:
    """What fails on one process fails on all that hold parts of these tensors: none goes on alone."""
    error: HolonomicError | None = None
    try:
        yield
    except HolonomicError as raised:
        error = raised
    failed = anywhere(error is not None, tensors)
    if error is not None:
        raise error
    if failed:
        raise kind(
            "another process found its part of a distributed tensor wrong, so this one stops too; the "
            "message there has the reason."
        )


# ---------------------------------------------------------------------- refusals
def check_group(group: Group, i: int, names: Sequence[str]) -> None:
    """Refuse what would be wrong where each process sees a part of the weights alone."""
    for p, name in zip(group["params"], names, strict=True):
        if getattr(p, "_fsdp_flattened", False):
            raise SettingError(
                f"group {i}: {name!r} is a flat piece of several parameters (FullyShardedDataParallel), "
                f"which neither a constraint nor noise can tell apart; use FSDP2 (fully_shard) or DDP."
            )
        why = _refusal(group, p.placements) if is_distributed(p) else None
        if why is not None:
            raise SettingError(
                f"group {i}: {name!r} is a distributed tensor (DTensor), and {why}. Without noise, "
                f"unconstrained groups, Circle(r) and Sphere(r) by rows work; for the rest keep the "
                f"parameters whole (DDP)."
            )


def _refusal(group: Group, placements: Sequence[Any]) -> str | None:
    scheme = parse(group["scheme"])
    if scheme.adaptive:
        return f"the thermostat of scheme {scheme.letters!r} would measure one part of the weights"
    if float(group["temperature"]) > 0 or scheme.letters == "LM":
        return (
            f"with temperature={float(group['temperature']):g} and scheme={scheme.letters!r} every "
            f"process would draw the same noise for its own part of the weights"
        )
    return _needs_more(group["constraint"], placements)


def _needs_more(constraint: Constraint | None, placements: Sequence[Any]) -> str | None:
    """Why a constraint needs more of a tensor than the part that one process has, or None."""
    if constraint is None:
        return None
    kind = type(constraint).__name__
    if type(constraint) not in (Circle, Sphere):  # a subclass may do anything
        return f"{kind} needs the whole of it"
    if isinstance(getattr(constraint, "radius", None), Tensor):
        return f"the tensor of radii of {kind} is for the whole of it"
    if not isinstance(constraint, Sphere):
        return None
    if constraint.dim != 0 or constraint.batch_dims:
        given = f"dim={constraint.dim}, batch_dims={constraint.batch_dims}"
        return f"Sphere({given}) is not by rows (dim=0)"
    cut = [how for how in placements if not how.is_replicate() and getattr(how, "dim", None) != 0]
    return f"it is cut across the rows of Sphere ({cut[0]})" if cut else None


def refuse_zero_redundancy() -> None:
    """ZeroRedundancyOptimizer builds an optimizer from the parameters of one process: groups differ from
    rank to rank, and one that is empty would raise on one rank while the others wait for it."""
    if processes() == 1:
        return
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.optim.zero_redundancy_optimizer":
            raise SettingError(
                "Langevin cannot be built by ZeroRedundancyOptimizer, which gives every process other "
                "parameter groups; use DDP with Langevin itself, or FSDP2."
            )
        frame = frame.f_back


# ---------------------------------------------------------------------- whole tensors: one noise for all
def check_ranks(group: Any) -> None:
    """Whether ``process_group`` is something that ranks can be compared in."""
    if group is None or group is False:
        return
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise SettingError(
            f"process_group is {group!r}; give a ProcessGroup that this rank is in (new_group returns "
            f"another thing on the ranks that are not), None for all ranks, or False if every rank "
            f"trains a model of its own."
        )


def require_one_seed(seed: int | None, group: Any, device: torch.device) -> None:
    """Ranks that train one model must draw the same noise: compare their seeds (None: it has none)."""
    if group is False or processes() == 1 or dist.get_world_size(group) == 1:
        return
    seeds = _gathered(seed, group, device)
    remedy = (
        "weights would drift apart; pass the same seed= on every rank, or process_group=False if every "
        "rank trains a model of its own."
    )
    without = [rank for rank, each in enumerate(seeds) if each is None]
    if without:
        raise SettingError(
            f"{len(seeds)} processes train together and {len(without)} of them (rank {without[0]}) "
            f"have no seed, so each would draw numbers of its own and the {remedy}"
        )
    found = sorted({each for each in seeds if each is not None})
    if len(found) > 1:
        raise SettingError(
            f"the ranks have {len(found)} different seeds ({', '.join(map(str, found[:4]))}), so the "
            f"{remedy}"
        )


def _gathered(seed: int | None, group: Any, device: torch.device) -> list[int | None]:
    """The seeds of all ranks, in the order of the group's."""
    known = [seed is not None, 0 if seed is None else seed]
    where = device if dist.get_backend(group) == "nccl" else "cpu"
    own = torch.tensor(known, dtype=torch.int64, device=where)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    _await(
        dist.all_gather(found, own, group=group, async_op=True),
        "ranks compare their seeds before they draw the first numbers (at a noisy step, or for new "
        "weights), and all of the group must do so together: pass process_group= for the ranks that "
        "train this model, or process_group=False if every rank trains a model of its own",
    )
    return [value if given else None for given, value in (t.tolist() for t in found)]


def _await(work: Any, rule: str) -> None:
    """Wait for all ranks to take part; raise with the rule if one does not, in `PATIENCE`."""
    try:
        work.wait(PATIENCE)
    except RuntimeError as error:
        raise SettingError(
            f"not all ranks came within {PATIENCE.total_seconds():g} s "
            f"({str(error).splitlines()[0]}); {rule}."
        ) from error
