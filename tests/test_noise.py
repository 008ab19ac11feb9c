"""Noise is a function of (seed, step, parameter, letter, element): the same however a step is executed."""

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holonomic as hm
from holonomic import native, philox
from holonomic.noise import Noise, ReplicaNoise, Stream

loader = import_module("holonomic.native.loader")  # whose name is that of a function, too
needs_kernels = pytest.mark.skipif(native.reason() is not None, reason=f"{native.reason()}")
EPS = torch.finfo(torch.float32).eps

#: Kernels and torch start from the same words, so from the same bits of u and of the angle. Each may be
#: wrong by a unit in the last place in the logarithm (of which the root halves the relative error), by half
#: of one in the root, by one in the sine or cosine, by half of one in the product: 2.5 on either side.
ROUNDING = 5 * EPS


def kernel(keys: Tensor, count: int, first: int, step: int, slot: int) -> Tensor:
    out = torch.full((len(keys), count), math.nan)
    native.normal_(out, keys, first, step, slot)
    return out


SOURCES: dict[str, Callable[..., Tensor]] = {"kernel": kernel, "torch": philox.normal}


@pytest.fixture(params=list(SOURCES))
def normal(request: pytest.FixtureRequest) -> Any:
    """Both sources, one after the other."""
    if request.param == "kernel" and native.reason() is not None:
        pytest.skip(f"{native.reason()}")
    return SOURCES[request.param]


@pytest.fixture(params=["kernel", "torch"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An optimizer that draws by kernels, and one that draws as if there were none."""
    if request.param == "torch":
        monkeypatch.setattr(loader, "_library", lambda: "left out for a test")
    elif native.reason() is not None:
        pytest.skip(f"{native.reason()}")
    return request.param


# ---------------------------------------------------------------------- the words
ONES = 0xFFFFFFFF
#: Counter, key and words, from the known answers of the Random123 distribution (philox4x32-10).
ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),  # digits of pi
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), ANSWERS)
def test_philox_gives_the_published_words(counter, key, words):
    k0, k1 = (torch.tensor([[k]]) for k in key)
    made = philox.philox(torch.tensor([counter[0]]), *counter[1:], k0, k1)
    assert tuple(w.item() for w in made) == words


@needs_kernels
@pytest.mark.parametrize(("counter", "key", "words"), ANSWERS)
def test_the_kernel_gives_the_published_words(counter, key, words):
    block, slot, low, high = counter
    made = native.words(key, block - block % 16, low | high << 32, slot)
    assert tuple(made[block % 16]) == words


@needs_kernels
@pytest.mark.parametrize("step", [0, 7, 2**32 - 1, 2**32, 2**40 + 3, 2**64 - 1])
def test_kernel_and_torch_have_the_same_words(step):
    """To the last bit, for blocks up to the last one."""
    key = (0x01234567, 0x89ABCDEF)
    k0, k1 = (torch.tensor([[k]]) for k in key)
    for block in (0, 16, 12_345 * 16, 2**31, 2**32 - 16):
        for slot in (0, 1, 63):
            counters = torch.arange(block, block + 16)
            expected = philox.philox(counters, slot, step & ONES, step >> 32, k0, k1)
            made = native.words(key, block, step, slot)
            assert made == torch.cat(expected).T.tolist()


# ---------------------------------------------------------------------- the numbers
def test_numbers_are_box_and_mullers_of_the_words(normal):
    """From the definition, in double precision: the length from 24 bits of one word, the angle within an
    octant from 24 of the other, the octant from three more. Element e is word (e div 16) mod 4 of block
    16 (e div 64) + e mod 16."""
    keys, step, slot = torch.tensor([[3, 5]]), 9, 2
    got = normal(keys, 192, 0, step, slot)[0]
    for e in range(192):
        block, word = 16 * (e // 64) + e % 16, e // 16 % 4
        made = philox.philox(torch.tensor([block]), slot, step, 0, keys[:, :1], keys[:, 1:])
        a, b = (made[word - word % 2 + k].item() for k in range(2))
        radius = math.sqrt(-2 * math.log(((a >> 8) + 0.5) / 2**24))
        signed = b - 2**32 if b >= 2**31 else b
        angle = ((signed >> 8) + 0.5) / 2**23 * math.pi / 4
        c, s = math.cos(angle), math.sin(angle)
        c, s = (s, c) if b & 1 else (c, s)
        pair = radius * (-c if b & 2 else c), radius * (-s if b & 4 else s)
        # u near 1 is rounded to 24 bits: its logarithm to eps absolutely, so the length to eps / length.
        rel = ROUNDING + EPS / radius**2
        assert got[e].item() == pytest.approx(pair[word % 2], rel=rel)


@needs_kernels
@pytest.mark.parametrize("count", [1, 2, 15, 17, 63, 64, 65, 511, 513, 1001, 70_001])
def test_kernel_and_torch_agree(count):
    keys = torch.tensor([[1, 2], [ONES, 0], [0x9E3779B9, 0xBB67AE85]])
    for first, step, slot in ((0, 0, 0), (1, 5, 1), (63, 2**32 - 1, 2), (100_003, 2**32 + 7, 63)):
        a, b = (make(keys, count, first, step, slot) for make in (kernel, philox.normal))
        assert a.shape == b.shape == (3, count)
        torch.testing.assert_close(a, b, rtol=ROUNDING, atol=0)


@needs_kernels
def test_kernel_and_torch_agree_at_the_end_of_a_stream():
    keys, end = torch.tensor([[1, 2]]), philox.NUMBERS
    a, b = (make(keys, 100, end - 100, 3, 0) for make in (kernel, philox.normal))
    torch.testing.assert_close(a, b, rtol=ROUNDING, atol=0)


def test_beyond_the_end_of_a_stream_there_is_nothing(normal):
    """Rather than the first numbers again, or whatever lies before the first."""
    keys = torch.tensor([[1, 2]])
    for first, count in ((philox.NUMBERS, 1), (philox.NUMBERS - 9, 10), (-1, 1), (-64, 64)):
        with pytest.raises((ValueError, native.Wrong), match=f"numbers {first} to"):
            normal(keys, count, first, 0, 0)


def test_a_number_depends_on_its_place_alone(normal):
    keys = torch.tensor([[7, 1], [7, 2], [8, 1]])
    whole = normal(keys, 5000, 0, 3, 1)
    for first, count in ((0, 1), (1, 63), (64, 64), (777, 1001), (4999, 1)):
        piece = normal(keys[1:2], count, first, 3, 1)
        torch.testing.assert_close(piece[0], whole[1, first : first + count], rtol=EPS, atol=0)


@needs_kernels
def test_threads_do_not_change_a_bit_of_the_noise():
    keys, before = torch.tensor([[7, 1], [7, 2]]), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(kernel(keys, 300_001, 5, 3, 1))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_no_numbers_at_all(normal):
    assert normal(torch.tensor([[1, 2], [3, 4]]), 0, 0, 0, 0).shape == (2, 0)
    assert normal(torch.tensor([[1, 2]]), 0, 64, 0, 0).shape == (1, 0)


# ---------------------------------------------------------------------- what they are like
N = 1 << 20


def z(values: Tensor, mean: float = 0.0, variance: float | None = None) -> float:
    """How many standard errors a mean is off what it should be."""
    x = values.double()
    variance = x.var().item() if variance is None else variance
    return (x.mean().item() - mean) * math.sqrt(x.numel() / variance)


def moments(x: Tensor) -> Iterator[tuple[str, float]]:
    """Mean, variance, skewness, kurtosis, and higher: E x^k and its variance for normal numbers."""
    known = {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96), 6: (15, 10170), 8: (105, 2016000)}
    for k, (mean, variance) in known.items():
        yield f"moment {k}", z(x.double() ** k, mean, variance)


def tails(x: Tensor) -> Iterator[tuple[str, float]]:
    """The fraction beyond some bounds, on either side: binomial."""
    for bound in (0.0, 0.5, 1.0, 2.0, 3.0, 4.0):
        p = math.erfc(bound / math.sqrt(2)) / 2
        for side, y in (("above", x), ("below", -x)):
            yield f"{side} {bound}", z((y > bound).double(), p, p * (1 - p))


def uncorrelated(a: Tensor, b: Tensor, what: str) -> Iterator[tuple[str, float]]:
    """Neither the numbers nor their squares."""
    a, b = a.double(), b.double()
    yield what, z(a * b, variance=1.0)
    yield f"{what}, squares", z((a * a - 1) * (b * b - 1), variance=4.0)


def statistics(normal: Callable[..., Tensor]) -> Iterator[tuple[str, float]]:
    keys = torch.tensor([[11, 12], [12, 12], [11, 13], [12, 11]])  # as near to each other as can be
    x, *others = normal(keys, N, 0, 0, 0)
    yield from moments(x)
    yield from tails(x)
    for lag in (1, 2, 3, 15, 16, 17, 32, 48, 64, 512, 4096):
        yield from uncorrelated(x[:-lag], x[lag:], f"lag {lag}")
    for k, other in enumerate(others):
        yield from uncorrelated(x, other, f"key {k + 1}")
    for step in (1, 2, 2**31, 2**32, 2**33):
        yield from uncorrelated(x, normal(keys[:1], N, 0, step, 0)[0], f"step {step}")
    for slot in (1, 2, 62, 63):
        yield from uncorrelated(x, normal(keys[:1], N, 0, 0, slot)[0], f"slot {slot}")


def test_noise_is_standard_normal_and_independent(normal):
    """Some 70 scores of a fixed seed: the largest of as many normal numbers exceeds 4 once in 200 times."""
    scores = dict(statistics(normal))
    assert len(scores) > 60
    assert {what: score for what, score in scores.items() if abs(score) > 4} == {}
    rms = math.sqrt(sum(score**2 for score in scores.values()) / len(scores))
    assert 0.7 < rms < 1.3  # they scatter as scores do


def test_the_first_numbers_of_many_parameters_are_normal():
    """Keys from names: the same element of many streams is a sample, too."""
    noise, t = Noise(1), torch.empty(1)
    x = torch.stack([noise.like(t, noise.stream(f"layers.{k}.weight"), 0, 0) for k in range(4000)])
    scores = dict([*moments(x), *uncorrelated(x[:-1], x[1:], "neighbours")])
    assert {what: score for what, score in scores.items() if abs(score) > 4} == {}


# ---------------------------------------------------------------------- streams of tensors
@pytest.mark.parametrize("shape", [(7, 5), (9, 3, 4), (130, 1), (1, 3), (64,)])
def test_a_piece_of_a_tensor_has_the_numbers_of_the_whole(shape, source):
    noise, t = Noise(3), torch.empty(shape)
    stream = noise.stream("w")
    whole = noise.like(t, stream, 4, 2)
    assert whole.shape == t.shape
    for start, stop in ((0, 1), (0, len(t)), (len(t) // 2, len(t)), (len(t) - 1, len(t))):
        piece = noise.like(t[start:stop], stream.cut(start, stop), 4, 2)
        torch.testing.assert_close(piece, whole[start:stop], rtol=EPS, atol=0)
    twice = stream.cut(len(t) // 2, len(t)).cut(0, 1)
    expected = whole[len(t) // 2][None]
    torch.testing.assert_close(noise.like(expected, twice, 4, 2), expected, rtol=EPS, atol=0)


@pytest.mark.parametrize("shape", [(), (5,), (3, 70)])
def test_replicas_have_the_numbers_of_single_optimizers(shape, source):
    seeds = (4, 5, 99, 2**63 - 1)
    stacked, t = ReplicaNoise(seeds), torch.empty(shape)
    whole = stacked.like(torch.empty(4, *shape), stacked.stream("w"), 2, 1)
    for seed, row in zip(seeds, whole, strict=True):
        alone = Noise(seed)
        expected = alone.like(t, alone.stream("w"), 2, 1)
        torch.testing.assert_close(row, expected, rtol=EPS, atol=0)
    some = stacked.like(torch.empty(2, *shape), stacked.stream("w").cut(1, 3), 2, 1)
    torch.testing.assert_close(some, whole[1:3], rtol=EPS, atol=0)


def test_kernels_and_torch_give_an_optimizer_the_same_numbers(monkeypatch):
    t, results = torch.empty(9, 77), []
    for _ in range(2):
        noise = Noise(5)
        results.append(noise.like(t, noise.stream("w"), 3, 1))
        monkeypatch.setattr(loader, "_library", lambda: "left out for a test")
    torch.testing.assert_close(*results, rtol=ROUNDING, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_have_the_same_numbers_rounded(dtype, source):
    noise, t = Noise(5), torch.empty(33)
    single = noise.like(t, noise.stream("w"), 3, 1)
    assert torch.equal(noise.like(t.to(dtype), noise.stream("w"), 3, 1), single.to(dtype))


def test_empty_tensors_and_single_numbers(source):
    noise = Noise(5)
    assert noise.like(torch.empty(0, 3), noise.stream("w"), 0, 0).shape == (0, 3)
    assert noise.like(torch.empty(()), noise.stream("w"), 0, 0).shape == ()
    stacked = ReplicaNoise((1, 2))
    assert stacked.like(torch.empty(2, 0), stacked.stream("w"), 0, 0).shape == (2, 0)


def test_streams_differ_by_seed_and_name():
    t = torch.empty(50)
    drawn = [
        Noise(seed).like(t, Noise(seed).stream(name), 0, 0)
        for seed, name in ((1, "a"), (2, "a"), (1, "b"), (11, "a"), (1, "1/a"))
    ]
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert not torch.isclose(a, b).any()


def test_a_stream_is_its_keys_and_a_row():
    keys = torch.tensor([[1, 2]])
    assert Stream(keys).cut(2, 5).row == 2
    assert Stream(keys).first(torch.empty(())) == 0
    assert Stream(keys, 2).first(torch.empty(3, 4)) == 8


# ---------------------------------------------------------------------- the noise of a step
#: How a step is executed. An unconstrained group takes the kernels if it is asked to.
WAYS: dict[str, dict[str, Any]] = {
    "together": {"foreach": True},
    "one by one": {"foreach": False},
    "kernels": {"fused": True},
}
SHAPES = (
    (600, 301),
    (40,),
    (7, 3, 5),
)  # the first is cut in pieces by torch, and in blocks by kernels


def momenta(
    named: list[tuple[str, Tensor]], constraint: Any = None, **settings: Any
) -> dict[str, Tensor]:
    """The momenta that one step from rest leaves without a force: noise and nothing else."""
    defaults = {"lr": 1e-6, "momentum": 0.0, "temperature": 1e-6, "seed": 3}
    params = [(name, nn.Parameter(t.clone())) for name, t in named]
    opt = hm.Langevin(params, constraint=constraint, **{**defaults, **settings})
    for _, p in params:
        p.grad = torch.zeros_like(p)
    opt.step()
    return {name: opt.state[p]["momentum_buffer"] for name, p in params}


@needs_kernels
@pytest.mark.parametrize("constraint", [None, hm.Circle(1.0)], ids=["none", "Circle"])
def test_a_step_has_the_same_noise_however_it_is_executed(constraint):
    """sigma = 1 and r = 1 here, so the momenta are the noise to the last bit, and that to rounding which
    torch draws."""
    named = [(f"p{k}", torch.zeros(shape)) for k, shape in enumerate(SHAPES)]
    results = {way: momenta(named, constraint, **settings) for way, settings in WAYS.items()}
    noise = Noise(3)
    for name, t in named:
        expected = noise.like(t, noise.stream(name), 0, 0)
        assert expected.abs().max() > 1
        for way in WAYS:
            torch.testing.assert_close(results[way][name], expected, rtol=2 * EPS, atol=0)


@pytest.mark.parametrize(
    "scheme", ["OBA", "BAOAB", "OBABO", "EM", "LM", "BACDEDCAB"], ids=lambda s: s
)
@pytest.mark.parametrize("name", ["none", "Circle", "Sphere", "Orthogonal"])
def test_a_run_has_the_same_noise_however_it_is_executed(name, scheme):
    """Several steps of words with several noisy letters, slack included. Steps are small: what is left is
    rounding, of numbers below 1 and momenta below 100."""
    constraints = {
        "none": None,
        "Circle": hm.Circle(0.5),
        "Sphere": hm.Sphere(1.5),
        "Orthogonal": hm.Orthogonal(),
    }
    settings: dict[str, Any] = {"lr": 1e-4, "temperature": 1e-3, "seed": 3, "scheme": scheme}
    if scheme == "BACDEDCAB":
        settings.update(coupling=0.1, noise=0.05)
    ways = {**WAYS, "kernels": {"fused": None}, "other noise": {"seed": 4}}
    results = {}
    for way, chosen in ways.items():
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(0.1 * torch.randn(s, generator=generator)) for s in ((6, 5), (9, 4))]
        opt = hm.Langevin(params, constraint=constraints[name], **{**settings, **chosen})
        for _ in range(5):
            for p in params:
                p.grad = torch.zeros_like(p)
            opt.step()
        results[way] = [p.detach() for p in params]
    for way in WAYS:
        for a, b in zip(results[way], results["together"], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=20 * EPS)
    for a, b in zip(results["other noise"], results["together"], strict=True):
        assert (a - b).abs().max() > 1000 * EPS


def test_noise_goes_by_the_name_of_a_parameter():
    """Not by its place, nor by what else the optimizer has."""
    named = [(name, torch.zeros(50)) for name in ("a", "b", "c")]
    first = momenta(named)
    assert not torch.isclose(first["a"], first["b"]).any()
    for others in (named[::-1], [named[1]], [("d", torch.zeros(7)), *named]):
        again = momenta(others)
        for name in first.keys() & again.keys():
            assert torch.equal(again[name], first[name])


def test_noise_goes_by_the_name_of_a_parameter_in_any_group():
    weights = {name: nn.Parameter(torch.zeros(50)) for name in ("a", "b", "c")}
    expected = momenta([(n, p.detach()) for n, p in weights.items()])
    groups = [{"params": [(n, weights[n])], "lr": 1e-6 * (k + 1)} for k, n in enumerate("cab")]
    opt = hm.Langevin(groups, momentum=0.0, temperature=1e-6, seed=3)
    for p in weights.values():
        p.grad = torch.zeros(50)
    opt.step()
    for k, name in enumerate("cab"):
        got = opt.state[weights[name]]["momentum_buffer"] * math.sqrt(k + 1)
        torch.testing.assert_close(got, expected[name], rtol=4 * EPS, atol=0)


def test_parameters_without_names_go_by_their_place():
    weights = [nn.Parameter(torch.zeros(50)) for _ in range(3)]
    opt = hm.Langevin(weights, momentum=0.0, temperature=1e-6, lr=1e-6, seed=3)
    for p in weights:
        p.grad = torch.zeros(50)
    opt.step()
    named = momenta([(str(k), torch.zeros(50)) for k in range(3)])
    for k, p in enumerate(weights):
        assert torch.equal(opt.state[p]["momentum_buffer"], named[str(k)])


# ---------------------------------------------------------------------- runs
def force(p: Tensor) -> Tensor:
    return torch.sin(3 * p.detach()) + 0.1


def train(opt: torch.optim.Optimizer, params: list[Any], steps: int) -> None:
    for _ in range(steps):
        for p in params:
            p.grad = force(p)
        opt.step()


@pytest.mark.parametrize("scheme", ["OBA", "BAOAB", "EM", "LM"])
@pytest.mark.parametrize("constraint", [None, hm.Circle(0.5), hm.Sphere(1.5)], ids=repr)
def test_a_run_that_is_resumed_has_the_same_numbers(constraint, scheme):
    def build() -> tuple[list[Any], hm.Langevin]:
        params = [nn.Parameter(torch.linspace(-0.3, 0.3, 35).reshape(5, 7)) for _ in range(2)]
        settings: dict[str, Any] = {"lr": 1e-2, "temperature": 1e-3, "scheme": scheme}
        return params, hm.Langevin(params, constraint=constraint, **settings)  # the seed is drawn

    params, opt = build()
    train(opt, params, 3)
    saved, weights = deepcopy(opt.state_dict()), [p.detach().clone() for p in params]
    train(opt, params, 4)
    again, other = build()
    with torch.no_grad():
        for p, w in zip(again, weights, strict=True):
            p.copy_(w)
    other.load_state_dict(saved)
    train(other, again, 4)
    assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))


@pytest.mark.parametrize("scheme", ["OBA", "BAOAB", "EM", "LM"])
@pytest.mark.parametrize("way", [{}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize(
    "constraint", [None, hm.Circle(0.6), hm.Sphere(0.9), hm.Orthogonal()], ids=repr
)
def test_a_replica_is_a_run_of_its_own(constraint, scheme, way):
    """Six steps with the replica's seed in an optimizer of its own: the same to rounding of numbers below 1
    (for matrices: of products of five)."""
    replicas = hm.Replicas(lambda: nn.Linear(5, 4), 3, seed=7)
    settings: dict[str, Any] = {"lr": 1e-2, "temperature": 1e-3, "scheme": scheme, **way}
    rules: dict[Any, Any] = {} if constraint is None else {"weight": constraint}
    single = [replicas[i] for i in range(3)]
    opt = hm.Langevin(replicas.groups(rules), generator=replicas.noise(), **settings)
    train(opt, list(replicas.parameters()), 6)
    for i, module in enumerate(single):
        seed = replicas.noise_seed(i)
        alone = hm.Langevin(hm.groups(module, rules), seed=seed, **settings)
        train(alone, list(module.parameters()), 6)
        for a, b in zip(replicas[i].parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=100 * EPS)


# ---------------------------------------------------------------------- no noise
def count_draws(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    for where in ("holonomic.native.normal_", "holonomic.philox.normal"):
        monkeypatch.setattr(where, lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("scheme", ["OBA", "BAOAB", "EM"])
@pytest.mark.parametrize("constraint", [None, hm.Circle(1.0), hm.Sphere(1.0)], ids=repr)
def test_without_a_step_size_nothing_is_drawn(constraint, scheme, monkeypatch):
    calls = count_draws(monkeypatch)
    p = nn.Parameter(torch.tensor([[0.1, 0.5], [0.2, -0.3]]))
    opt = hm.Langevin([p], lr=0.0, temperature=1.0, constraint=constraint, scheme=scheme, seed=1)
    before = p.detach().clone()
    train(opt, [p], 3)
    assert torch.equal(p.detach(), before)
    assert calls == []
    assert opt.param_groups[0]["steps_taken"] == 0


@pytest.mark.parametrize("constraint", [None, hm.Circle(1.0), hm.Sphere(1.0)], ids=repr)
def test_a_run_without_noise_leaves_the_global_generator_alone(constraint):
    """As SGD does. With noise and no seed, one number is drawn from it, once."""
    for temperature, lr, draws in ((0.0, 0.1, False), (1e-3, 0.0, False), (1e-3, 0.1, True)):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        p = nn.Parameter(torch.tensor([[0.1, 0.5], [0.2, -0.3]]))
        opt = hm.Langevin([p], lr=lr, temperature=temperature, constraint=constraint)
        train(opt, [p], 1)
        after = torch.get_rng_state()
        assert torch.equal(before, after) is not draws
        train(opt, [p], 2)
        assert torch.equal(torch.get_rng_state(), after)


def test_two_optimizers_without_a_seed_differ_and_a_global_seed_repeats_them():
    def run() -> list[Tensor]:
        torch.manual_seed(5)
        results = []
        for _ in range(2):
            p = nn.Parameter(torch.zeros(20))
            train(hm.Langevin([p], lr=0.1, temperature=1.0), [p], 2)
            results.append(p.detach())
        return results

    (a, b), (c, d) = run(), run()
    assert not torch.isclose(a, b).any()
    assert torch.equal(a, c)
    assert torch.equal(b, d)
