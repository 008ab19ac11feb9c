"""A scheme is its letters: what a word runs as, on the first step and on every later one."""

import pytest

from holonomic import SettingError
from holonomic.scheme import OVERDAMPED, parse

# letters -> (first step, every later step), as (letter, fraction)
A, B, O = ("A", 1.0), ("B", 1.0), ("O", 1.0)
a, b, o = ("A", 0.5), ("B", 0.5), ("O", 0.5)
WORDS = {
    "OBA": ([O, B, A], [O, B, A]),
    "BOA": ([B, O, A], [B, O, A]),
    "ABO": ([B, O, A], [B, O, A]),
    "AOB": ([O, B, A], [O, B, A]),
    "BAO": ([B, A], [O, B, A]),
    "OAB": ([B, O, A], [B, O, A]),
    "BAOA": ([B, a, O, a], [B, a, O, a]),
    "AOAB": ([B, a, O, a], [B, a, O, a]),
    "ABAO": ([B, a, O, a], [B, a, O, a]),
    "BAOAB": ([b, a, O, a], [B, a, O, a]),
    "ABOBA": ([b, O, b, A], [b, O, b, A]),
    "OBABO": ([o, b, A], [b, O, b, A]),
    "OABAO": ([B, a, O, a], [B, a, O, a]),
    "BOAOB": ([b, o, A], [o, B, o, A]),
    "BABO": ([b, A], [b, O, b, A]),
}


def spelled(substeps):
    return [(s.letter, s.fraction) for s in substeps]


@pytest.mark.parametrize("letters", WORDS)
def test_words(letters):
    first, steady = WORDS[letters]
    scheme = parse(letters)
    assert spelled(scheme.first) == first
    assert spelled(scheme.steady) == steady
    assert scheme.letters == letters
    assert not scheme.overdamped


@pytest.mark.parametrize("letters", WORDS)
def test_a_step_is_a_cyclic_shift_and_takes_the_whole_of_every_letter(letters):
    steady = parse(letters).steady
    total = {x: sum(s.fraction for s in steady if s.letter == x) for x in "ABO"}
    assert total == {"A": 1.0, "B": 1.0, "O": 1.0}
    n = len(letters)
    fractions = {x: 1 / letters.count(x) for x in letters}
    spelled_out = "".join(s.letter * round(s.fraction / fractions[s.letter]) for s in steady)
    assert spelled_out in {letters[k:] + letters[:k] for k in range(n)}


@pytest.mark.parametrize("letters", WORDS)
def test_the_gradient_is_used_where_it_was_taken(letters):
    """No A before the last B, on the first step or later: the gradient is of the starting point."""
    for word in (parse(letters).first, parse(letters).steady):
        spelled_out = "".join(s.letter for s in word)
        assert "A" not in spelled_out[: spelled_out.rindex("B")]
        assert spelled_out.endswith("A")


@pytest.mark.parametrize("letters", OVERDAMPED)
def test_overdamped_schemes_are_one_letter(letters):
    scheme = parse(letters)
    assert scheme.overdamped
    assert spelled(scheme.first) == spelled(scheme.steady) == [(letters, 1.0)]


def test_three_kicks_take_a_third_each_and_merge_to_one():
    assert spelled(parse("BBBOA").steady) == [B, O, A]
    assert spelled(parse("BOBBA").first) == [("B", 1 / 3), O, ("B", 2 / 3), A]


@pytest.mark.parametrize(
    ("letters", "message"),
    [
        ("", r"scheme is ''; it must be a word"),
        (None, r"scheme is None; it must be a word"),
        (3, r"scheme is 3; it must be a word"),
        ("OBX", r"unknown letter 'X'.*A \(drift\), B \(kick\) and O"),
        ("oba", r"unknown letter 'o'"),
        ("EMA", r"unknown letter 'M'"),
        ("OB", r"has no A: without it nothing moves"),
        ("OA", r"has no B: without it the gradient is never used"),
        ("BA", r"has no O: .*set momentum=1"),
        ("ABAOB", r"kicks at 2 positions, so it needs 2 gradients a step"),
        ("ABABAOB", r"kicks at 3 positions, so it needs 3 gradients a step"),
    ],
)
def test_errors_say_what_is_wrong_and_what_to_do(letters, message):
    with pytest.raises(SettingError, match=message):
        parse(letters)
