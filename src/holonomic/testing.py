"""A battery of checks for a constraint of your own: call `check_constraint` from a test.

It uses the public interface alone. What it compares with is mathematics: projections are idempotent and
symmetric, drifts start along the tangent and run backwards, entries of a batch do not see each other, and
a run goes on from a checkpoint bit for bit.
"""

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from holonomic.constraints import Constraint
from holonomic.constraints.checks import follow_tolerance
from holonomic.langevin import Langevin
from holonomic.phase import Phase, wide

SCHEMES = ("OBA", "ABO", "BAOAB", "EM", "LM", "BACDEDCAB")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def check_constraint(
    make: Callable[[int], Constraint],
    shape: Sequence[int],
    *,
    scale: float = 1.0,
    tolerance: float = 64.0,
    seed: int = 0,
) -> None:
    """Raise `AssertionError`, saying what is wrong, unless a constraint keeps its contract.

    Args:
        make: the constraint for a number of batch dimensions, as ``lambda b: Sphere(1.0, batch_dims=b)``.
        shape: a small shape of weights that can carry it.
        scale: the size of the random weights it is tried on, before they are placed.
        tolerance: rounding errors allowed in ``residual`` and ``cotangency``, in units of the spacing of
            numbers at 1 and of the largest weight or momentum.
        seed: of the random numbers.
    """
    battery = _Battery(make, tuple(shape), scale, tolerance, seed)
    for name in dir(battery):
        if name.startswith("check_"):
            getattr(battery, name)()


class _Battery:
    """One method per promise."""

    def __init__(
        self,
        make: Callable[[int], Constraint],
        shape: tuple[int, ...],
        scale: float,
        tolerance: float,
        seed: int,
    ) -> None:
        self.make, self.shape, self.scale, self.tolerance = make, shape, scale, tolerance
        self.constraint = make(0)
        self.generator = torch.Generator().manual_seed(seed)

    # ------------------------------------------------------------------ what is shared
    def draw(self, *lead: int) -> Tensor:
        return torch.randn(*lead, *self.shape, dtype=torch.float64, generator=self.generator)

    def weights(self, *lead: int, dtype: torch.dtype = torch.float64) -> Parameter:
        return Parameter((self.scale * self.draw(*lead)).to(dtype))

    def point(self) -> Phase:
        """A point of the manifold with random momenta, tangent to it."""
        w = self.scale * self.draw()
        names = ["w"]
        self.constraint.check([w], names)
        self.constraint.place_([w], names)
        x = Phase([w], names=names)
        if "xi" in self.constraint.lists:
            x.xi = self.constraint.slacks([w], open=True)
            self.constraint.follow_(
                x, 0.0
            )  # an opened slack is brought to the manifold with its weight
        x.v = [self.draw()]
        if "eta" in self.constraint.lists:
            x.eta = [torch.randn(x.xi[0].shape, dtype=torch.float64, generator=self.generator)]
        self.constraint.project_(x)
        return x

    def langevin(self, w: Parameter, batch_dims: int = 0, **settings: Any) -> Langevin:
        usual: dict[str, Any] = {"lr": 0.01, "temperature": 0.05, "seed": 1}
        if settings.get("scheme") == "BACDEDCAB":
            usual.update(coupling=0.1, noise=0.1)
        return Langevin([("w", w)], constraint=self.make(batch_dims), **{**usual, **settings})

    @staticmethod
    def step(w: Parameter, optimizer: Langevin) -> None:
        w.grad = torch.sin(3 * w.detach()) + 0.1
        optimizer.step()

    def small(self, error: float, size: float, dtype: torch.dtype, what: str) -> None:
        eps = max(torch.finfo(dtype).eps, torch.finfo(wide(torch.empty(0, dtype=dtype)).dtype).eps)
        bound = self.tolerance * eps * max(1.0, size)
        assert error <= bound, f"{what} is {error:.3g}, and rounding explains {bound:.3g} ({dtype})"

    # ------------------------------------------------------------------ the promises
    def check_placing(self) -> None:
        """Weights are put on the manifold; placed weights stay bit for bit."""
        for dtype in DTYPES:
            w = self.weights(dtype=dtype)
            optimizer = self.langevin(w)
            size = w.detach().abs().max().item() ** 2
            self.small(optimizer.report().groups[0].residual, size, dtype, "the residual as placed")
            before = w.detach().clone()
            self.langevin(w)
            assert torch.equal(before, w.detach()), f"placing twice moves weights ({dtype})"

    def check_projection(self) -> None:
        """P is idempotent, symmetric, and has the rank that `codimension` says."""
        x = self.point()
        once = [t.clone() for t in (*x.v, *x.eta)]
        self.constraint.project_(x)
        for a, b in zip(once, (*x.v, *x.eta), strict=True):
            assert torch.allclose(a, b, atol=1e-12), "projecting twice is not projecting once"
        if x.xi:
            return
        columns = []
        for e in torch.eye(x.q[0].numel(), dtype=torch.float64):
            x.v = [e.reshape(x.q[0].shape).clone()]
            self.constraint.project_(x)
            columns.append(x.v[0].flatten())
        P = torch.stack(columns)
        if "xi" not in self.constraint.lists:
            assert torch.allclose(P, P.T, atol=1e-12), "the projection is not symmetric"
            rank = round(P.trace().item())
            dof = P.shape[0] - self.constraint.codimension(x.q)
            assert rank == dof, f"tangent vectors have {rank} dimensions, codimension leaves {dof}"

    def check_drift(self) -> None:
        """It starts along -v, with an error of second order, and runs backwards."""
        start = self.point()
        if self.constraint.lists != ("v", "xi"):  # then momenta are not those of the weights
            right = torch.allclose(self._velocity(start), start.v[0], atol=1e-6)
            assert right, "a drift does not start along the momentum"
        errors = []
        for h in (1e-3, 5e-4):
            x = start.map(torch.clone)
            self.constraint.drift_(x, h)
            flat = start.q[0] - h * self._velocity(start)
            errors.append((x.q[0] - flat).abs().max().item())
        assert errors[1] <= 0.3 * errors[0] + 1e-12, "a drift does not start straight"
        x = start.map(torch.clone)
        self.constraint.drift_(x, 0.05)
        for t in (*x.v, *x.eta):
            t.neg_()
        self.constraint.drift_(x, 0.05)
        assert torch.allclose(x.q[0], start.q[0], atol=1e-10), "a drift cannot be undone"

    def _velocity(self, x: Phase) -> Tensor:
        """-dq/dh of the drift, by central differences."""
        forth, back = x.map(torch.clone), x.map(torch.clone)
        self.constraint.drift_(forth, 1e-5)
        self.constraint.drift_(back, -1e-5)
        return (back.q[0] - forth.q[0]) / 2e-5

    def check_schemes(self) -> None:
        """On the manifold and tangent after every step, in every type."""
        for scheme in SCHEMES:
            for dtype in DTYPES:
                w = self.weights(dtype=dtype)
                optimizer = self.langevin(w, scheme=scheme)
                for _ in range(4):
                    self.step(w, optimizer)
                    report = optimizer.report().groups[0]
                    size = w.detach().abs().max().item() ** 2
                    self.small(report.residual, size, dtype, f"the residual after {scheme}")
                    v = optimizer.state[w].get("momentum_buffer")
                    if v is not None:
                        speed = v.abs().max().item() * max(1.0, size)
                        self.small(report.cotangency, speed, dtype, f"|g'v| after {scheme}")
                assert report.changed == 0, (
                    f"an ordinary step of {scheme} counts as a change by hand"
                )

    def check_following(self) -> None:
        """Weights changed by hand are noticed, and back on the manifold after one step."""
        w = self.weights()
        optimizer = self.langevin(w)
        for _ in range(2):
            self.step(w, optimizer)
        w.data.mul_(0.8)
        if self.make(0).residual(self._seen(w, optimizer)) <= follow_tolerance(w.dtype):
            return  # scaled weights are still on this manifold
        self.step(w, optimizer)
        report = optimizer.report().groups[0]
        assert report.changed == 1, "weights scaled by hand are not noticed"
        self.small(
            report.residual, w.detach().abs().max().item() ** 2, w.dtype, "the residual after it"
        )

    def _seen(self, w: Parameter, optimizer: Langevin) -> Phase:
        state = optimizer.state[w]
        return Phase([w.detach()], xi=[state["slack"]] if "slack" in state else [], names=["w"])

    def check_batches(self) -> None:
        """Entries of a batch do not see each other, to rounding."""
        w = self.weights(3)
        start = w.detach().clone()
        optimizer = self.langevin(w, batch_dims=1, temperature=0.0)
        for _ in range(5):
            self.step(w, optimizer)
        for i in range(3):
            alone = Parameter(start[i].clone())
            single = self.langevin(alone, temperature=0.0)
            for _ in range(5):
                self.step(alone, single)
            same = torch.allclose(w.detach()[i], alone.detach(), atol=1e-10)
            assert same, (
                "an entry of a batch depends on the others: do the methods respect batch_dims?"
            )

    def check_checkpoints(self) -> None:
        """Saved as plain values; a run goes on bit for bit."""
        w = self.weights()
        optimizer = self.langevin(w)
        for _ in range(3):
            self.step(w, optimizer)
        file = io.BytesIO()
        torch.save({"w": w.detach(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        twin = Parameter(saved["w"])
        other = self.langevin(twin, seed=9)
        other.load_state_dict(saved["optimizer"])
        for _ in range(3):
            self.step(w, optimizer)
            self.step(twin, other)
        assert torch.equal(w.detach(), twin.detach()), "a resumed run is another one"
