"""Two processes (gloo, on this machine): what is allowed equals one process, the rest is refused by both.

A test sends a function to two processes that stay for the whole file, and gets what it returns on each.
Every function has a time limit: a process that waits for the other for ever fails its test, and both are
replaced.
"""

import copy
import math
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import holonomic as hm
from holonomic import Circle, Constraint, Langevin, LevelSet, Orthogonal, Sphere, distributed
from holonomic.errors import CheckpointError, ConstraintError, NonFiniteError, SettingError

LIMIT = 90  # seconds that a function may take, on a machine that does other things too
ADAPTIVE: dict[str, Any] = {"scheme": "BACDEDCAB", "coupling": 1e-4, "temperature": 1e-3}


# ---------------------------------------------------------------------- two processes
class Ranks:
    """Two processes that run what they are sent, together."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._jobs = 0

    def __call__(self, function: Callable[..., Any], *args: Any, parted: bool = False) -> list[Any]:
        """What ``function(rank, *args)`` returns on each of the ranks; fails if it raises or takes long.

        After a function that leaves them out of step (``parted``) they are replaced."""
        self._start()
        self._jobs += 1
        for pipe in self._pipes:
            pipe.send((f"job{self._jobs}", function, args, parted))
        deadline = time.monotonic() + LIMIT
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < 2 and time.monotonic() < deadline:
            for rank, pipe in enumerate(self._pipes):
                if rank not in answers and pipe.poll(0.02):
                    answers[rank] = pipe.recv()
                    if not answers[rank][0]:  # the other may wait for this one: not for long
                        deadline = min(deadline, time.monotonic() + 5)
        wrong = [f"rank {rank}:\n{text}" for rank, (right, text) in answers.items() if not right]
        wrong += [f"rank {rank} did not end" for rank in range(2) if rank not in answers]
        if wrong or parted:
            self.stop()
        if wrong:
            pytest.fail("\n".join(wrong), pytrace=False)
        return [answers[rank][1] for rank in range(2)]

    def _start(self) -> None:
        if self._processes:
            return
        context = multiprocessing.get_context("spawn")
        for rank in range(2):
            here, there = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, self._store.port, there), daemon=True
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


def serve(rank: int, port: int, pipe: Any) -> None:
    """The life of one of them."""
    torch.set_num_threads(1)
    server = dist.TCPStore("127.0.0.1", port, None, is_master=False)
    while True:
        try:
            job, function, args, parted = pipe.recv()
        except EOFError:
            return
        try:
            store = dist.PrefixStore(job, server)
            limit = timedelta(seconds=LIMIT)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
            answer = True, function(rank, *args)
            if not parted:
                dist.barrier()
                dist.destroy_process_group()
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("this torch has no torch.distributed with gloo")
    two = Ranks()
    yield two
    two.stop()


def message(kind: type[Exception], call: Callable[[], Any]) -> str:
    """The message of the error that a call raises."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    before = distributed.PATIENCE
    distributed.PATIENCE = timedelta(seconds=seconds)
    yield
    distributed.PATIENCE = before


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often each collective of `torch.distributed` is called."""
    calls: dict[str, int] = {}
    names = ("all_gather", "all_reduce", "broadcast", "barrier", "all_gather_object", "reduce")
    genuine = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return genuine[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    yield calls
    for name in names:
        setattr(dist, name, genuine[name])


# ---------------------------------------------------------------------- models
def net(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Layers of 7, 3 and 1 outputs: two processes have 4 and 3, 2 and 1, 1 and 0 of them."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1)
        return nn.Sequential(*layers).to(dtype)


def cut(model: nn.Module, shape: tuple[int, ...] = (2,), dim: int = 0) -> nn.Module:
    """The model by FSDP2: its parameters become distributed tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    names = ("copies", "parts")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(dim if p.dim() > 1 else 0))
    return model


def build(model: nn.Module, constraint: Constraint | None, **settings: Any) -> Langevin:
    """Weights under a constraint, biases free."""
    rules = {} if constraint is None else {"*.weight": constraint}
    return Langevin(hm.groups(model, rules), **{"lr": 0.05, "weight_decay": 0.01, **settings})


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, shift: float = 0.0
) -> None:
    p = next(model.parameters())
    x = torch.linspace(-1, 1, 40, dtype=p.dtype).reshape(8, 5) + shift
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - 1).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()


def full(t: Tensor) -> Tensor:
    """The whole of a tensor, on every rank."""
    t = t.detach()
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).clone()


def values(model: nn.Module) -> list[Tensor]:
    return [full(p) for p in model.parameters()]


def held(optimizer: Langevin) -> list[Tensor]:
    """All state, whole."""
    return [
        full(optimizer.state[p][key])
        for group in optimizer.param_groups
        for p in group["params"]
        for key in sorted(optimizer.state[p])
    ]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Equal to the last bit."""
    return len(a) == len(b) and all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    assert len(a) == len(b)
    assert all(s.shape == t.shape for s, t in zip(a, b, strict=True))
    return max(((s - t).abs().max().item() for s, t in zip(a, b, strict=True)), default=0.0)


ALLOWED: dict[str, Callable[[], Constraint | None]] = {
    "none": lambda: None,
    "Circle": lambda: Circle(0.4),
    "Sphere": lambda: Sphere(0.8),
    "Sphere-equality": lambda: Sphere(0.8, slack=False),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": 0.1}, "draw the same noise"),
    "LM": ({"scheme": "LM"}, "draw the same noise"),
    "thermostat": (ADAPTIVE, "thermostat of scheme 'BACDEDCAB'"),
    "adaptive noise": ({**ADAPTIVE, "noise": 0.1, "temperature": 0.0}, "thermostat"),
    "Orthogonal": ({"constraint": Orthogonal()}, "Orthogonal needs the whole"),
    "LevelSet": ({"constraint": LevelSet(lambda *w: w[0].mean())}, "LevelSet needs the whole"),
    "Sphere-whole": ({"constraint": Sphere(1.0, dim=None)}, "not by rows"),
    "Sphere-columns": ({"constraint": Sphere(1.0, dim=1)}, "not by rows"),
    "Circle-tensor": ({"constraint": Circle(torch.ones(1))}, "tensor of radii"),
    "Sphere-tensor": ({"constraint": Sphere(torch.ones(1))}, "tensor of radii"),
}


# ---------------------------------------------------------------------- FSDP2: what is allowed
def _equals_one_process(rank: int, name: str, dtype: torch.dtype) -> dict[str, float]:
    found = {}
    for scheme in ("OBA", "BAOAB", "EM"):
        for fused in (None, False):
            settings = {"scheme": scheme, "fused": fused, "lr": 0.01}
            whole, parts = net(dtype), cut(net(dtype))
            alone = build(whole, ALLOWED[name](), **settings)
            shared = build(parts, ALLOWED[name](), **settings)
            assert same(values(whole), values(parts)), "placed alike"
            train(whole, alone, 12)
            train(parts, shared, 12)
            gaps = distance(values(whole), values(parts)), distance(held(alone), held(shared))
            found[f"{scheme} fused={fused}"] = max(gaps)
            assert parts[4].weight._local_tensor.shape[0] == 1 - rank, "one has nothing of it"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALLOWED)
def test_distributed_tensors_move_as_whole_ones(
    ranks: Ranks, name: str, dtype: torch.dtype
) -> None:
    """Uneven parts, and empty ones, to rounding. Free weights by the letters of torch to the last bit: its
    fused step, and in 16 bits every step, rounds the last few entries of a tensor otherwise."""
    first, second = ranks(_equals_one_process, name, dtype)
    assert first == second
    assert max(first.values()) <= 20 * torch.finfo(dtype).eps, first
    if name == "none" and dtype.itemsize > 2:
        assert all(gap == 0 for way, gap in first.items() if "fused=False" in way), first


def _with_partial_gradients(rank: int) -> None:
    """Tensor parallelism may leave a gradient that is yet to be summed over the processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(DTensor.from_local(torch.zeros(3), mesh, [Replicate()]))
    optimizer = Langevin([p], lr=1.0, momentum=0.0)
    p.grad = DTensor.from_local(torch.full((3,), rank + 1.0), mesh, [Partial()])
    optimizer.step()
    assert torch.equal(full(p), torch.full((3,), -3.0))
    assert optimizer.report().groups[0].kinetic_temperature == 9.0  # copies count once


@pytest.mark.slow
def test_gradients_that_are_sums_to_be_taken(ranks: Ranks) -> None:
    ranks(_with_partial_gradients)


# ---------------------------------------------------------------------- FSDP2: what is refused
def _refused_at_construction(rank: int) -> dict[str, str]:
    found = {}
    for case, (settings, _) in REFUSED.items():
        model = cut(net())
        before = values(model)
        weights = [(n, p) for n, p in model.named_parameters() if n.endswith("weight")]
        call = lambda settings=settings, weights=weights: Langevin(weights, lr=0.1, **settings)  # noqa: E731
        found[case] = message(SettingError, call)
        assert same(before, values(model)), case
    optimizer = build(cut(net()), None)
    extra = {"params": [("more", cut(nn.Linear(4, 4)).weight)], "temperature": 0.1}
    found["added"] = message(SettingError, lambda: optimizer.add_param_group(extra))
    assert len(optimizer.param_groups) == 1
    model = cut(nn.Linear(4, 4), dim=1)
    before = values(model)
    found["rows cut"] = message(
        SettingError, lambda: Langevin([model.weight], constraint=Sphere(0.1))
    )
    assert same(before, values(model))
    return found


@pytest.mark.slow
def test_refused_at_construction(ranks: Ranks) -> None:
    first, second = ranks(_refused_at_construction)
    assert first == second
    expected = {
        **{case: why for case, (_, why) in REFUSED.items()},
        "rows cut": "cut across the rows",
    }
    expected["added"] = "draw the same noise"
    for case, why in expected.items():
        assert why in first[case], case
        assert "keep the parameters whole (DDP)" in first[case]


def _refused_when_changed(rank: int) -> dict[str, str]:
    found = {}
    for case, (settings, _) in REFUSED.items():
        model = cut(net())
        optimizer = build(model, None)
        train(model, optimizer, 2)
        before = values(model)
        optimizer.param_groups[0].update(settings)
        found[case] = message(SettingError, lambda m=model, o=optimizer: train(m, o, 1))
        assert same(before, values(model)), case
    saved = optimizer.state_dict()
    saved["param_groups"][0].update(REFUSED["temperature"][0], scheme="OBA", constraint=None)
    optimizer = build(model, None)
    optimizer.load_state_dict(saved)
    found["loaded"] = message(SettingError, lambda: train(model, optimizer, 1))
    assert same(before, values(model))
    return found


@pytest.mark.slow
def test_refused_when_a_setting_changes(ranks: Ranks) -> None:
    first, second = ranks(_refused_when_changed)
    assert first == second
    for case, (_, why) in REFUSED.items():
        assert why in first[case], case
    assert "draw the same noise" in first["loaded"]


def _one_part_cannot_be_placed(rank: int) -> list[str]:
    model = cut(net())
    if rank == 1:
        with torch.no_grad():
            model[0].weight._local_tensor[0] = 0
    before = values(model)
    found = [message(ConstraintError, lambda: build(model, Sphere(1.0, slack=False)))]
    assert same(before, values(model))
    with torch.no_grad():
        model[0].weight._local_tensor.fill_(0.5)
    optimizer = build(model, Sphere(1.0, slack=False))
    if rank == 1:
        with torch.no_grad():
            model[0].weight._local_tensor[0] = 0
    before = values(model)
    found.append(message(ConstraintError, lambda: train(model, optimizer, 1)))
    assert same(before, values(model))
    return found


@pytest.mark.slow
def test_weights_that_one_process_cannot_place(ranks: Ranks) -> None:
    """Both raise, when the optimizer is built and at its first step: else one would wait for ever."""
    first, second = ranks(_one_part_cannot_be_placed)
    assert all("another process" in text for text in first)
    assert all("is zero and has no direction" in text for text in second)


def _flat_pieces(rank: int) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)
    return message(SettingError, lambda: Langevin(model.parameters(), lr=0.1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_flat_pieces_of_the_first_fsdp_are_refused(ranks: Ranks) -> None:
    for text in ranks(_flat_pieces):
        assert "fully_shard" in text


# ---------------------------------------------------------------------- FSDP2: NaN
def _nan_on_one_rank(rank: int, name: str) -> list[str]:
    found = []
    for layer, bad in ((0, 1), (2, 0), (4, 0)):  # of the last, rank 1 has nothing
        for nonfinite in ("raise", "skip"):
            model = cut(net())
            optimizer = build(model, ALLOWED[name](), nonfinite=nonfinite)
            train(model, optimizer, 1)
            before = values(model)
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            if rank == bad:
                model[layer].weight.grad._local_tensor[0, 0] = math.nan
            if nonfinite == "raise":
                found.append(message(NonFiniteError, optimizer.step))
                assert f"{layer}.weight" in found[-1]
            else:
                optimizer.step()
                assert optimizer.report().groups[0].skipped == 1
            assert same(before, values(model))
            train(model, optimizer, 1)
            assert not same(before, values(model))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "Circle"])
def test_a_nan_on_one_rank_is_seen_by_all(ranks: Ranks, name: str) -> None:
    first, second = ranks(_nan_on_one_rank, name)
    assert first == second
    assert "has 1 of 35 entries NaN or Inf" in first[0]


# ---------------------------------------------------------------------- FSDP2: reports
def _reports(rank: int, name: str) -> list[dict[str, Any]]:
    found = []
    for shape in ((2,), (2, 1), (1, 2)):  # parts on both, copies on both, parts again
        whole, parts = net(), cut(net(), shape)
        alone, shared = (build(m, ALLOWED[name](), lr=0.01) for m in (whole, parts))
        for steps in (0, 5):
            train(whole, alone, steps)
            train(parts, shared, steps)
            pairs = zip(alone.report().groups, shared.report().groups, strict=True)
            for a, b in pairs:
                assert (a.parameters, a.dof, a.constraint) == (b.parameters, b.dof, b.constraint)
                assert math.isclose(a.residual, b.residual, rel_tol=0.3, abs_tol=1e-7)
                if steps:
                    assert math.isclose(a.kinetic_temperature, b.kinetic_temperature, rel_tol=1e-5)
                found.append(asdict(b))
    if rank == 1:
        with torch.no_grad():
            parts[0].weight._local_tensor.mul_(0.9)  # somebody changes the weights of one process
    train(parts, shared, 1)
    found += [asdict(group) for group in shared.report().groups]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ALLOWED)
def test_reports_are_of_whole_parameters(ranks: Ranks, name: str) -> None:
    first, second = ranks(_reports, name)
    assert repr(first) == repr(second)  # NaN differs from itself
    if name != "none":
        assert first[-2]["changed"] == 1


def _report_of_one(rank: int) -> str | None:
    model = cut(net())
    optimizer = build(model, None)
    if rank == 1:
        time.sleep(4)
        return None
    with patience(1):
        return message(SettingError, optimizer.report)


@pytest.mark.slow
def test_a_report_that_one_rank_asks_for(ranks: Ranks) -> None:
    text, _ = ranks(_report_of_one, parted=True)
    assert "not all ranks came within 1 s" in text
    assert "report()" in text


# ---------------------------------------------------------------------- ZeroRedundancyOptimizer
def _zero_redundancy(rank: int) -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = net()
    groups = [{"params": [p], "lr": 0.1 * (k + 1)} for k, p in enumerate(model.parameters())]
    return message(SettingError, lambda: ZeroRedundancyOptimizer(groups, Langevin, momentum=0.5))


@pytest.mark.slow
def test_zero_redundancy_is_refused(ranks: Ranks) -> None:
    for text in ranks(_zero_redundancy):
        assert "ZeroRedundancyOptimizer" in text


# ---------------------------------------------------------------------- DDP: one noise
def replicated(rank: int, **settings: Any) -> tuple[nn.Module, Langevin]:
    model = net()
    optimizer = build(model, Circle(0.4), **{"temperature": 0.1, **settings})
    return nn.parallel.DistributedDataParallel(model), optimizer


def gathered(model: nn.Module) -> list[list[Tensor]]:
    """The weights of every rank."""
    own = torch.cat([t.flatten() for t in values(model)])
    found = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(found, own)
    return [[t] for t in found]


def _same_seed(rank: int) -> None:
    for scheme in ("OBA", "BAOAB", "EM", "LM", "BACDEDCAB"):
        extra = {"coupling": 1e-4, "noise": 0.05} if "C" in scheme else {}
        model, optimizer = replicated(rank, scheme=scheme, seed=3, **extra)
        with counted() as calls:
            train(model, optimizer, 4, shift=float(rank))  # other data on every rank
        assert calls == {"all_gather": 1}, calls
        assert same(*gathered(model))


@pytest.mark.slow
def test_ranks_with_one_seed_stay_together(ranks: Ranks) -> None:
    ranks(_same_seed)


def _refused_seeds(rank: int) -> list[str]:
    found = []
    for seeds in ((1, 2), (None, None), (None, 5)):
        for process_group in (None, dist.new_group([0, 1])):
            model, optimizer = replicated(rank, seed=seeds[rank], process_group=process_group)
            before = values(model)
            found.append(message(SettingError, lambda m=model, o=optimizer: train(m, o, 1)))
            assert same(before, values(model))
    return found


def _new_weights(rank: int) -> list[str]:
    """Orthogonal weights that are drawn: no noise follows, but they must be the same."""
    found = []
    for seeds in ((1, 2), (None, None)):
        model = net()
        before = values(model)
        constraint = Orthogonal(init="orthogonal")
        call = lambda m=model, c=constraint, s=seeds: build(m, c, seed=s[rank], weight_decay=0.0)  # noqa: E731
        found.append(message(SettingError, call))
        assert same(before, values(model))
    model = net()
    build(model, Orthogonal(init="orthogonal"), seed=3, weight_decay=0.0)
    assert not same(before, values(model))
    assert same(*gathered(model))
    return found


@pytest.mark.slow
def test_new_weights_need_one_seed(ranks: Ranks) -> None:
    first, second = ranks(_new_weights)
    assert first == second
    assert "2 different seeds" in first[0]
    assert "have no seed" in first[1]


@pytest.mark.slow
def test_other_seeds_and_none_are_refused(ranks: Ranks) -> None:
    first, second = ranks(_refused_seeds)
    assert first == second
    assert all("2 different seeds (1, 2)" in text for text in first[:2])
    assert all("2 of them (rank 0) have no seed" in text for text in first[2:4])
    assert all("1 of them (rank 0) have no seed" in text for text in first[4:])
    assert all("same seed= on every rank" in text for text in first)


def _own_models(rank: int) -> None:
    alone = [dist.new_group([0]), dist.new_group([1])]
    for process_group in (False, alone[rank]):
        model = net()
        optimizer = build(
            model, Circle(0.4), temperature=0.1, seed=rank, process_group=process_group
        )
        with counted() as calls:
            train(model, optimizer, 3)
        assert calls == {}, calls
        assert not same(*gathered(model))


@pytest.mark.slow
def test_every_rank_may_train_a_model_of_its_own(ranks: Ranks) -> None:
    ranks(_own_models)


def _not_a_member(rank: int) -> list[str]:
    found = []
    others = [dist.new_group([0]), dist.new_group([1])][1 - rank]
    for process_group in (others, True, "ranks"):
        call = lambda g=process_group: Langevin([nn.Parameter(torch.zeros(2))], process_group=g)  # noqa: E731
        found.append(message(SettingError, call))
    return found


@pytest.mark.slow
def test_what_is_no_process_group_is_refused(ranks: Ranks) -> None:
    for texts in ranks(_not_a_member):
        assert all("process_group is" in text for text in texts)


def _without_noise(rank: int) -> None:
    quiet: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "noise": 0.1},  # of adaptive friction, which OBA has not
        {"temperature": 0.1, "momentum": 1.0},
        {"temperature": 0.1, "lr": 0.0},
        {"temperature": 0.1, "scheme": "BACDEDCAB", "coupling": 1e-4},
    ]
    for settings in quiet:
        model, optimizer = replicated(rank, **settings)
        state = torch.get_rng_state()
        with counted() as calls:
            train(model, optimizer, 3)
            optimizer.report()
        assert calls == {}, (settings, calls)
        assert torch.equal(state, torch.get_rng_state()), "no seed was drawn"
        assert same(*gathered(model))


@pytest.mark.slow
def test_without_noise_there_is_nothing_to_compare(ranks: Ranks) -> None:
    ranks(_without_noise)


def _one_noisy_rank(rank: int) -> str | None:
    model = net()
    optimizer = build(model, None, temperature=0.1, seed=0)
    before = values(model)
    if rank == 1:
        time.sleep(4)
        return None
    with patience(1):
        text = message(SettingError, lambda: train(model, optimizer, 1))
    assert same(before, values(model))
    return text


@pytest.mark.slow
def test_a_noisy_step_of_one_rank_alone(ranks: Ranks) -> None:
    text, _ = ranks(_one_noisy_rank, parted=True)
    assert "not all ranks came within 1 s" in text
    assert "process_group=False" in text


# ---------------------------------------------------------------------- checkpoints
def _round_trip(rank: int, name: str, scheme: str, folder: str, sharded: bool) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def fresh(seed: int) -> tuple[nn.Module, Langevin]:
        model = net(seed=seed)
        noise = {} if sharded else {"temperature": 0.1, "seed": 5}
        placed = cut(model) if sharded else nn.parallel.DistributedDataParallel(model)
        return placed, build(model, ALLOWED[name](), scheme=scheme, **noise)

    model, optimizer = fresh(0)
    train(model, optimizer, 3)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"m": weights, "o": state}, checkpoint_id=folder)
    train(model, optimizer, 3)
    other, twin = fresh(1)
    weights, state = get_state_dict(other, twin)
    loaded = {"m": weights, "o": state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(other, twin, model_state_dict=loaded["m"], optim_state_dict=loaded["o"])
    train(other, twin, 3)
    assert same(values(model), values(other))
    assert same(held(optimizer), held(twin))


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [True, False], ids=["FSDP2", "DDP"])
@pytest.mark.parametrize("scheme", ["OBA", "BAOAB", "EM"])
@pytest.mark.parametrize("name", ALLOWED)
def test_distributed_checkpoints_continue_bitwise(
    ranks: Ranks, name: str, scheme: str, sharded: bool, tmp_path: Path
) -> None:
    ranks(_round_trip, name, scheme, str(tmp_path), sharded)


def _whole_checkpoints(rank: int, name: str) -> None:
    """From two processes to one and back, by checkpoints of whole tensors."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_state_dict,
    )

    options = StateDictOptions(full_state_dict=True)
    parts = cut(net())
    shared = build(parts, ALLOWED[name](), lr=0.01)
    train(parts, shared, 3)
    weights, state = copy.deepcopy(get_state_dict(parts, shared, options=options))
    for sharded in (False, True):
        model = cut(net(seed=1)) if sharded else net(seed=1)
        optimizer = build(model, ALLOWED[name](), lr=0.01)
        given = copy.deepcopy((weights, state))
        set_state_dict(
            model, optimizer, model_state_dict=given[0], optim_state_dict=given[1], options=options
        )
        assert same(values(parts), values(model))
        assert same(held(shared), held(optimizer))
        train(model, optimizer, 3)
        if sharded:
            train(parts, shared, 3)
            assert same(values(parts), values(model))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALLOWED)
def test_checkpoints_of_whole_tensors(ranks: Ranks, name: str) -> None:
    ranks(_whole_checkpoints, name)


def _wrong_checkpoints(rank: int) -> list[str]:
    parts, whole = cut(net()), net()
    shared, alone = (build(m, Circle(0.4)) for m in (parts, whole))
    train(parts, shared, 2)
    train(whole, alone, 2)
    before = held(shared)
    found = [message(CheckpointError, lambda: shared.load_state_dict(alone.state_dict()))]
    saved = copy.deepcopy(shared.state_dict())
    if rank == 1:
        saved["state"][0]["slack"]._local_tensor[0, 0] = math.nan
    found.append(message(CheckpointError, lambda: shared.load_state_dict(saved)))
    assert same(before, held(shared))
    return found


@pytest.mark.slow
def test_checkpoints_that_do_not_fit_are_refused_by_all(ranks: Ranks) -> None:
    first, second = ranks(_wrong_checkpoints)
    assert "set_optimizer_state_dict" in first[0]
    assert first[0] == second[0]
    assert "another process" in first[1]
    assert "holds NaN or Inf" in second[1]


def _from_sgd(rank: int, name: str) -> float:
    found = []
    for model in (net(), cut(net())):
        groups = [{"params": g["params"]} for g in build(model, ALLOWED[name]()).param_groups]
        sgd = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
        train(model, sgd, 3)
        optimizer = build(model, ALLOWED[name](), lr=0.01)
        optimizer.load_state_dict(sgd.state_dict())
        train(model, optimizer, 3)
        found.append([*values(model), *held(optimizer)])
    return distance(*found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALLOWED)
def test_momenta_of_sgd_are_taken_over(ranks: Ranks, name: str) -> None:
    assert max(ranks(_from_sgd, name)) <= 1e-5


def _state_of_one(rank: int) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer = replicated(rank, seed=0, weight_decay=0.0)
    if rank == 0:
        with counted() as calls:
            get_optimizer_state_dict(model, optimizer)
        assert calls == {}
    train(model, optimizer, 2)
    assert same(*gathered(model))


@pytest.mark.slow
def test_one_rank_alone_may_ask_for_the_state(ranks: Ranks) -> None:
    """To save it, say, before the first step."""
    ranks(_state_of_one)


# ---------------------------------------------------------------------- without torch.distributed
def test_a_torch_without_processes_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    model = net()
    optimizer = build(model, Circle(0.4), temperature=0.1, seed=0)
    train(model, optimizer, 2)
    optimizer.report()
    with pytest.raises(SettingError, match="process_group is 'ranks'"):
        build(net(), None, process_group="ranks")
