"""A splitting scheme is its letters.

    A  drift      q <- q - lr v          (along the geodesic, if there is a constraint)
    B  kick       v <- v + g
    O  friction   v <- mu v + sqrt(tau (1 - mu^2) / lr) R
    C, D, E, F    friction that adapts itself, in place of O (see `holonomic.thermostat`)

A letter that occurs n times takes 1/n of the step each time, so ``"BAOAB"`` has halves of B and A.
``"EM"`` (Euler-Maruyama) and ``"LM"`` (averaged noise) are the overdamped schemes, without momentum.

A training loop gives one gradient a step, at the position where the step starts. So a scheme runs
from just after the A that comes before its kicks: ``ABO`` as its cyclic shift ``BOA``, ``ABOBA`` as
``BOBAA``, ``BAOAB`` as ``BBAOA``, equal neighbours merged to a whole. The letters moved to the front
belong to the step before; the very first step has none before it and leaves them out (half a kick
for BAOAB), unless no kick would be left.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import groupby

from holonomic.errors import SettingError

OVERDAMPED = ("EM", "LM")
LETTERS = "ABOCDEF"


@dataclass(frozen=True)
class Substep:
    """One letter and the fraction of the step it takes."""

    letter: str
    fraction: float


@dataclass(frozen=True)
class Scheme:
    """The substeps of the first step and of every later one."""

    letters: str
    first: tuple[Substep, ...]
    steady: tuple[Substep, ...]

    @property
    def overdamped(self) -> bool:
        return self.letters in OVERDAMPED

    @property
    def adaptive(self) -> bool:
        """Whether the friction is a variable with a thermostat of its own."""
        return not self.overdamped and "E" in self.letters


def parse(letters: str) -> Scheme:
    """Read a scheme, or raise a `SettingError` that says which letter is wrong.

    >>> [(s.letter, s.fraction) for s in parse("BAOAB").steady]
    [('B', 1.0), ('A', 0.5), ('O', 1.0), ('A', 0.5)]
    """
    if not isinstance(letters, str) or not letters:
        raise SettingError(
            f"scheme is {letters!r}; it must be a word such as 'OBA', 'BAOAB' or 'EM'."
        )
    return _parse(letters)


@cache
def _parse(letters: str) -> Scheme:
    if letters in OVERDAMPED:
        whole = (Substep(letters, 1.0),)
        return Scheme(letters, whole, whole)
    _validate(letters)
    cut = _before_kicks(letters)
    head, tail = letters[:cut], letters[cut:]
    steady = tail + head
    first = head if "B" in head else steady
    return Scheme(letters, _substeps(first, letters), _substeps(steady, letters))


def _validate(letters: str) -> None:
    for letter in letters:
        if letter not in LETTERS:
            raise SettingError(
                f"scheme {letters!r} has the unknown letter {letter!r}; write it with "
                f"A (drift), B (kick) and O (friction and noise) or C, D, E, F (adaptive friction), "
                f"or use 'EM' or 'LM'."
            )
    remedies = {
        "A": "without it nothing moves",
        "B": "without it the gradient is never used",
        "O": "for motion without friction keep O and set momentum=1",
    }
    if set("CDEF") & set(letters):
        _validate_adaptive(letters)
        del remedies["O"]
    for letter, remedy in remedies.items():
        if letter not in letters:
            raise SettingError(f"scheme {letters!r} has no {letter}: {remedy}.")


def _validate_adaptive(letters: str) -> None:
    if "O" in letters:
        raise SettingError(
            f"scheme {letters!r} has both O and letters of the adaptive friction; use one of them, "
            f"as in 'BAOAB' or 'BACDEDCAB'."
        )
    if "E" not in letters:
        raise SettingError(f"scheme {letters!r} has no E: without it the friction never adapts.")
    if "F" in letters and set("CD") & set(letters):
        raise SettingError(
            f"scheme {letters!r} has F beside C or D; F is both of them in one, as in 'BAFEFAB'."
        )
    if "F" not in letters and "C" not in letters:
        raise SettingError(f"scheme {letters!r} has neither C nor F: the friction never acts.")


def _before_kicks(letters: str) -> int:
    """The place just after an A, from where the kicks come before anything moves again."""
    after = [i + 1 for i, letter in enumerate(letters) if letter == "A"]
    runs = {cut: (letters[cut:] + letters[:cut]).split("A")[0] for cut in after}
    kicked = [cut for cut, run in runs.items() if "B" in run]
    if len(kicked) > 1:
        raise SettingError(
            f"scheme {letters!r} kicks at {len(kicked)} positions, so it needs {len(kicked)} "
            f"gradients a step and a training loop gives one; keep the B's together between two "
            f"A's (the end joins the beginning), as in 'BAOAB' or 'ABOBA'."
        )
    return kicked[0]


def _substeps(word: str, letters: str) -> tuple[Substep, ...]:
    """Merge equal neighbours: two half kicks at one position are one kick, exactly."""
    return tuple(
        Substep(letter, float(Fraction(len(list(run)), letters.count(letter))))
        for letter, run in groupby(word)
    )
