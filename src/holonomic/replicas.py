"""Many independent runs as one stacked model: one batched forward, one optimizer step."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from holonomic.constraints import Constraint
from holonomic.errors import CheckpointError, SettingError
from holonomic.groups import Rule, Settings
from holonomic.groups import groups as groups_of
from holonomic.noise import Noise, ReplicaNoise

Loss = Callable[[Tensor, Tensor], Tensor]
Penalty = Callable[[dict[str, Tensor]], Tensor]

_INIT, _ORDER, _NOISE = 0, 1, 2  # what a replica's seeds are for
_TRACES = 32  # computations kept before they are forgotten


def child_seed(seed: int, *path: int) -> int:
    """A seed of its own for every path below ``seed``, statistically independent of the others."""
    return int(np.random.SeedSequence(seed, spawn_key=path).generate_state(1, np.uint64)[0] >> 1)


class Replicas:
    """``n`` independent copies of a module, their parameters stacked along a new first dimension.

    Replica i is what ``module_factory()`` makes under its own seed, and has its own data order
    (`order`) and noise (`noise`). What happens to it does not depend on n, beyond rounding.

        replicas = hm.Replicas(lambda: nn.Linear(2, 1), n=100, seed=0)
        opt = hm.Langevin(replicas.groups({}), lr=0.1, temperature=1e-4, generator=replicas.noise())
        for x, y in replicas.order(X, Y, batch_size=2):
            replicas.backward(loss, x, y)
            opt.step()
        replicas[7]                                     # an ordinary module

    Args:
        module_factory: makes one module; its random numbers come from torch's global generator,
            which is seeded for it and restored afterwards.
        n: how many.
        seed: seed of all replicas; replica i's seeds derive from (seed, first + i).
        first: number of the first replica, to make replicas first ... first + n - 1 of a larger set.
        device: where the replicas live; they are made where ``module_factory`` makes them.
        compile: run the gradient through `torch.compile`, which takes seconds to begin with. Where it
            cannot work (it needs a C++ compiler) there is a warning, and no harm.
    """

    def __init__(
        self,
        module_factory: Callable[[], nn.Module],
        n: int,
        seed: int = 0,
        *,
        first: int = 0,
        device: torch.device | str | None = None,
        compile: bool = False,
    ) -> None:
        if not isinstance(n, int) or n < 1:
            raise SettingError(f"n is {n!r}; there must be at least one replica.")
        self.n, self.seed, self.first = n, seed, first
        self._compile = compile
        modules = []
        for i in range(n):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(child_seed(seed, _INIT, first + i))
                modules.append(module_factory().to(device))
        _check_modules(modules)
        self.template = modules[0]
        named = [dict(m.named_parameters()) for m in modules]
        self._parameters = {
            name: nn.Parameter(torch.stack([m[name].detach() for m in named]), p.requires_grad)
            for name, p in named[0].items()
        }
        buffers = [dict(m.named_buffers()) for m in modules]
        self._buffers = {name: torch.stack([b[name] for b in buffers]) for name in buffers[0]}
        self._traced: dict[Any, Any] = {}

    def __len__(self) -> int:
        return self.n

    # ------------------------------------------------------------------ parameters
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names of the module, each with its stacked parameter (n, ...)."""
        yield from self._parameters.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The stacked parameters."""
        yield from self._parameters.values()

    def groups(self, rules: Mapping[Rule, Settings], **defaults: Any) -> list[dict[str, Any]]:
        """`holonomic.groups` for the stack: rules as for one module, one constraint per replica."""
        stacked = groups_of(self.template, rules, **defaults)
        for group in stacked:
            group["params"] = [(name, self._parameters[name]) for name, _ in group["params"]]
            group["batch_dims"] = 1
            constraint = group.get("constraint")
            if isinstance(constraint, Constraint):
                group["constraint"] = _stacked(constraint)
        return stacked

    def noise(self) -> Noise:
        """A stream of noise per replica: pass it to `Langevin` as ``generator``. Replica i has the numbers
        of an optimizer of its own with the seed ``noise_seed(i)``."""
        seeds = [self.noise_seed(i) for i in range(self.n)]
        return ReplicaNoise(seeds, next(self.parameters()).device)

    def noise_seed(self, i: int) -> int:
        """The seed of the noise of replica i."""
        return self._child(_NOISE, i)

    def order(self, x: Tensor, y: Tensor, batch_size: int, *, own: bool = False) -> "ReplicaOrder":
        """Batches for every replica, each in its own random order, from data they share or (``own``)
        data of its own (see `ReplicaOrder`)."""
        seeds = [self._child(_ORDER, i) for i in range(self.n)]
        return ReplicaOrder(x, y, batch_size, seeds, own=own)

    def _child(self, what: int, i: int) -> int:
        return child_seed(self.seed, what, self.first + i)

    # ------------------------------------------------------------------ evaluating
    def __call__(self, x: Tensor) -> Tensor:
        """Every replica on its own batch: (n, batch, ...) to (n, batch, ...), differentiable."""
        self._check_batch("x", x)
        return vmap(self._one)(self._parameters, self._buffers, x)

    @torch.no_grad()
    def predict(self, x: Tensor, *, own: bool = False, chunk: int = 8) -> Tensor:
        """Every replica on the same inputs (batch, ...), or each on its ``own`` (n, batch, ...);
        without gradients, ``chunk`` replicas at a time."""
        if own:
            self._check_batch("x", x)
        outputs = []
        for start in range(0, self.n, chunk):
            part = slice(start, start + chunk)
            p = {k: v[part] for k, v in self._parameters.items()}
            b = {k: v[part] for k, v in self._buffers.items()}
            outputs.append(vmap(self._one, (0, 0, 0 if own else None))(p, b, x[part] if own else x))
        return torch.cat(outputs)

    def _one(self, parameters: Any, buffers: Any, x: Tensor) -> Tensor:
        return functional_call(self.template, (parameters, buffers), (x,))

    def backward(self, loss: Loss, x: Tensor, y: Tensor, penalty: Penalty | None = None) -> Tensor:
        """Set the gradients of all replicas at once, and return their losses (n,).

        ``loss(output, y)`` is the loss of one replica, ``penalty(parameters)`` is added to it. The
        computation is traced once for each loss, penalty and shape, and then replayed without Python
        or autograd in it: whatever they read besides their arguments is a constant.
        """
        self._check_batch("x", x)
        self._check_batch("y", y)
        key = (loss, penalty, x.shape, y.shape, x.dtype, y.dtype)
        parameters = {k: p.detach() for k, p in self._parameters.items()}
        if key not in self._traced:
            if len(self._traced) == _TRACES:
                warnings.warn(
                    f"backward has traced {_TRACES} different losses or shapes; a loss written as a "
                    f"lambda inside the loop is a new one every time: define it once, outside.",
                    stacklevel=2,
                )
                self._traced.clear()
            self._traced[key] = self._trace(loss, penalty, parameters, x, y)
        with torch.no_grad():
            grads, losses = self._traced[key](parameters, self._buffers, x, y)
        for name, p in self._parameters.items():
            if p.requires_grad:
                p.grad = grads[name]
        return losses

    def _trace(
        self, loss: Loss, penalty: Penalty | None, p: dict[str, Tensor], x: Tensor, y: Tensor
    ) -> Any:
        def objective(p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            value = loss(self._one(p, b, x), y)
            return value if penalty is None else value + penalty(p)

        stacked = vmap(grad_and_value(objective))
        if self._compile:
            import torch._dynamo  # takes a second, and few need it

            compiled = torch.compile(stacked, dynamic=False)
            try:
                # Now, as it will be called. All stacks of a process count as one function, so the usual
                # limit to how often a function is compiled would stop the ninth.
                with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=10 * _TRACES):
                    compiled(p, self._buffers, x, y)
                return compiled
            except Exception as error:  # of whatever the compiler's many parts are missing
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                warnings.warn(
                    f"compile=True has no effect: {reason}. The gradients are the same, slower.",
                    stacklevel=3,
                )
        return _simplified(make_fx(stacked, tracing_mode="fake")(p, self._buffers, x, y))

    def _check_batch(self, name: str, t: Tensor) -> None:
        if t.shape[:1] != (self.n,):
            raise SettingError(
                f"{name} has shape {tuple(t.shape)}, and its first dimension must be the {self.n} "
                f"replicas; use `order` to draw batches, or `predict` for inputs they share."
            )

    # ------------------------------------------------------------------ taking out, saving
    def __getitem__(self, i: int) -> nn.Module:
        """Replica i as an ordinary module (a copy)."""
        if not -self.n <= i < self.n:
            raise IndexError(f"replica {i} of {self.n}")
        module = deepcopy(self.template)
        parts = {**self._parameters, **self._buffers}
        with torch.no_grad():
            for name, t in (*module.named_parameters(), *module.named_buffers()):
                t.copy_(parts[name][i])
        return module

    def state_dict(self) -> dict[str, Tensor]:
        """The stacked parameters and buffers."""
        return {
            name: t.detach().clone() for name, t in {**self._parameters, **self._buffers}.items()
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave, for as many replicas of the same module."""
        mine = {**self._parameters, **self._buffers}
        for name in [*mine, *(k for k in state if k not in mine)]:
            if name not in mine or name not in state or mine[name].shape != state[name].shape:
                have = tuple(mine[name].shape) if name in mine else "missing"
                other = tuple(state[name].shape) if name in state else "missing"
                raise CheckpointError(
                    f"{name!r} is {have} here and {other} in the checkpoint; build the same module "
                    f"as many times."
                )
        for name, t in mine.items():
            t.copy_(state[name])


class ReplicaOrder:
    """One epoch of batches for every replica, each in its own random order, epoch after epoch.

    Data of shape (N, ...) is shared; with ``own``, (n, N, ...) gives each replica its own. A last
    batch smaller than the others is kept. Iterating goes through one epoch; `state_dict` (between
    epochs) resumes.
    """

    def __init__(
        self, x: Tensor, y: Tensor, batch_size: int, seeds: list[int], *, own: bool = False
    ) -> None:
        lead = 2 if own else 1
        if x.shape[:lead] != y.shape[:lead] or (own and len(x) != len(seeds)):
            what = f"(n = {len(seeds)}, data)" if own else "(data,)"
            raise SettingError(
                f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}; both must begin with {what}."
            )
        self._own, self._size = own, x.shape[lead - 1]
        if not 1 <= batch_size <= self._size:
            raise SettingError(
                f"batch_size is {batch_size}; it must lie between 1 and the {self._size} data."
            )
        self._x, self._y, self.batch_size = x, y, batch_size
        self._generators = [torch.Generator().manual_seed(s) for s in seeds]

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-self._size // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        index = torch.stack([torch.randperm(self._size, generator=g) for g in self._generators])
        index = index.to(self._x.device)
        rows = torch.arange(len(index), device=index.device).unsqueeze(1)
        x = self._x[rows, index] if self._own else self._x[index]
        y = self._y[rows, index] if self._own else self._y[index]
        for start in range(0, self._size, self.batch_size):
            batch = slice(start, start + self.batch_size)
            yield x[:, batch].contiguous(), y[:, batch].contiguous()

    def state_dict(self) -> dict[str, Tensor]:
        """Where each replica's random order stands."""
        return {"generators": torch.stack([g.get_state() for g in self._generators])}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`."""
        for g, saved in zip(self._generators, state["generators"], strict=True):
            g.set_state(saved.cpu().clone())  # torch (2.13) crashes on a view into a larger tensor


class RunningMean:
    """The mean of predictions over samples along a trajectory (3.4), without keeping them.

    >>> mean = RunningMean()
    >>> mean.add(torch.tensor([0.0])); mean.add(torch.tensor([1.0]))
    >>> mean.value, mean.count
    (tensor([0.5000]), 2)
    """

    def __init__(self) -> None:
        self.count = 0
        self._total: Tensor | None = None

    def add(self, sample: Tensor) -> None:
        """Count one more sample."""
        total = sample.detach().double()
        self._total = total if self._total is None else self._total + total
        self.count += 1

    @property
    def value(self) -> Tensor:
        """The mean so far."""
        if self._total is None:
            raise SettingError("no sample has been added yet, so there is no mean.")
        return (self._total / self.count).float()


def _simplified(graph: fx.GraphModule) -> fx.GraphModule:
    """Take out what vmap leaves in: views of a tensor as itself, products with 1."""
    aten = torch.ops.aten
    views = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
    for node in list(graph.graph.nodes):
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or "val" not in source.meta:
            continue
        same_view = node.target in views and node.meta["val"].shape == source.meta["val"].shape
        if same_view or (node.target is aten.mul.Scalar and node.args[1] == 1):
            node.replace_all_uses_with(source)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _stacked(constraint: Any) -> Any:
    """The constraint (a dataclass) of every replica."""
    return replace(constraint, batch_dims=constraint.batch_dims + 1)


def _check_modules(modules: list[nn.Module]) -> None:
    shapes = [{k: tuple(t.shape) for k, t in m.state_dict().items()} for m in modules]
    if any(s != shapes[0] for s in shapes[1:]):
        raise SettingError(
            "module_factory makes modules of different shapes; they cannot be stacked."
        )
    if not shapes[0]:
        raise SettingError("module_factory makes a module without parameters; nothing to train.")
    for name, module in modules[0].named_modules():
        what = f"{name or 'the module'!r} ({type(module).__name__})"
        if getattr(module, "track_running_stats", False):
            raise SettingError(
                f"{what} keeps running statistics, which a stacked forward cannot update; use "
                f"track_running_stats=False, GroupNorm or LayerNorm."
            )
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise SettingError(
                f"{what} draws random numbers from torch's global generator, so replicas would "
                f"depend on each other; set p=0 (temperature is the noise here)."
            )
