"""Data: real files where they are, and files of our own making for everything that can go wrong."""

import gzip
import hashlib
import http.server
import os
import struct
import threading
from pathlib import Path

import pytest
import torch

from holonomic.lab import data
from holonomic.lab.data import fetch
from holonomic.lab.data.fetch import Remote, find
from holonomic.lab.data.images import read_idx

DATA = Path(os.environ.get("HOLONOMIC_DATA") or "no data")
needs_data = pytest.mark.skipif(
    not (DATA / "SHA256SUMS").exists(), reason="the data sets are not here (set HOLONOMIC_DATA)"
)


@pytest.fixture
def real(monkeypatch):
    monkeypatch.setenv("HOLONOMIC_DATA", str(DATA))


@pytest.fixture
def empty(monkeypatch, tmp_path):
    """No data anywhere, and a cache of our own."""
    monkeypatch.delenv("HOLONOMIC_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


# ---------------------------------------------------------------------- the real files
@needs_data
@pytest.mark.usefixtures("real")
@pytest.mark.parametrize("load", [data.mnist, data.fashion_mnist])
def test_images(load):
    images = load()
    assert images.train_x.shape == (60_000, 1, 28, 28)
    assert images.test_x.shape == (10_000, 1, 28, 28)
    assert images.train_x.min() == 0
    assert images.train_x.max() == 1
    assert torch.bincount(images.test_y).min() >= 890  # MNIST's fives are the fewest, 892
    assert images.train_y.unique().tolist() == list(range(10))


@needs_data
@pytest.mark.usefixtures("real")
def test_fashion_mnist_classes_are_balanced():
    assert torch.bincount(data.fashion_mnist().train_y).tolist() == [6000] * 10


@needs_data
@pytest.mark.usefixtures("real")
def test_text():
    ptb = data.penn_treebank()
    assert [len(t) for t in (ptb.train, ptb.valid, ptb.test)] == [929_589, 73_760, 82_430]
    assert len(ptb.words) == 10_000
    wiki = data.wikitext2()
    assert [len(t) for t in (wiki.train, wiki.valid, wiki.test)] == [2_088_628, 217_646, 245_569]
    assert len(wiki.words) == 33_278
    assert ptb.words[ptb.train[24]] == "<eos>"


@needs_data
@pytest.mark.usefixtures("real")
def test_tables():
    chess = data.chess()
    assert chess.x.shape == (28_056, 48)
    assert (chess.x.sum(1) == 6).all()
    assert torch.bincount(chess.y)[0] == 2796  # draws
    poker = data.poker()
    assert poker.x.shape == (25_010, 85)
    assert (poker.x.sum(1) == 10).all()
    assert torch.bincount(poker.y).tolist() == [12493, 10599, 1206, 513, 93, 54, 36, 6, 5, 5]


# ---------------------------------------------------------------------- made data
def test_trigonometric_follows_its_equation():
    x, y = data.trigonometric(1000, a=6, b=1, noise=0.0, seed=0)
    angle = torch.pi * x[:, 0]
    torch.testing.assert_close(
        x[:, 1], torch.where(y == 0, angle.cos(), angle.sin()), atol=1e-5, rtol=0
    )
    assert x[:, 0].max() > 5.9
    assert y.sum() == 500


def test_batches_shift_by_one_word_and_lose_nothing_in_between():
    pieces = data.batches(torch.arange(23), size=2, length=4)
    assert [x.shape[1] for x, _ in pieces] == [4, 4, 2]
    assert all(torch.equal(x + 1, y) for x, y in pieces)
    assert torch.cat([x for x, _ in pieces], 1).tolist() == [list(range(10)), list(range(11, 21))]


def test_idx_files(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(
        gzip.compress(b"\x00\x00\x08\x02" + struct.pack(">2I", 2, 3) + bytes(range(6)))
    )
    assert read_idx(path).tolist() == [[0, 1, 2], [3, 4, 5]]
    path.write_bytes(gzip.compress(b"\x00\x00\x08\x01" + struct.pack(">I", 9) + b"123"))
    with pytest.raises(data.DataError, match=r"holds 3 bytes and its header says \(9,\)"):
        read_idx(path)
    path.write_bytes(gzip.compress(b"GIF89a"))
    with pytest.raises(data.DataError, match="not an IDX file"):
        read_idx(path)


# ---------------------------------------------------------------------- fetching
CONTENT = b"x" * 300_000


@pytest.fixture
def served(tmp_path):
    """A server on this machine, with one file."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "a.bin").write_bytes(CONTENT)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, directory=str(tmp_path / "site"), **kwargs)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/a.bin"
    server.shutdown()
    server.server_close()


def remote(url: str, content: bytes = CONTENT) -> Remote:
    return Remote("set", "a.bin", hashlib.sha256(content).hexdigest(), url)


def test_a_download_is_checked_cached_and_shown(served, empty):
    seen = []
    (path,) = find([remote(served)], progress=lambda *a: seen.append(a))
    assert path == empty / "cache" / "holonomic" / "set" / "a.bin"
    assert path.read_bytes() == CONTENT
    assert seen[-1] == ("a.bin", len(CONTENT), len(CONTENT))
    seen.clear()
    assert find([remote(served)], progress=lambda *a: seen.append(a)) == [path]
    assert not seen  # from the cache


def test_a_download_of_something_else_is_not_kept(served, empty):
    with pytest.raises(data.DataError, match=r"has the sha256 [0-9a-f]{64} and should have"):
        find([remote(served, b"other")])
    assert not list((empty / "cache").rglob("*.bin*"))


def test_an_altered_file_is_named_with_both_sums(served, empty, monkeypatch):
    monkeypatch.setenv("HOLONOMIC_DATA", str(empty))
    (empty / "set").mkdir()
    (empty / "set" / "a.bin").write_bytes(CONTENT[:-1])
    wanted, found = (hashlib.sha256(c).hexdigest() for c in (CONTENT, CONTENT[:-1]))
    with pytest.raises(
        data.DataError, match=f"a.bin has the sha256 {found} and should have {wanted}"
    ):
        find([remote(served)])


def test_without_a_network_it_says_which_files_go_where(empty, monkeypatch):
    def refuse(*_, **__):
        raise fetch.urllib.error.URLError("no route to host")

    monkeypatch.setattr(fetch.urllib.request, "urlopen", refuse)
    with pytest.raises(data.DataError) as caught:
        data.penn_treebank()
    for name in ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt", "HOLONOMIC_DATA", "no route"):
        assert name in str(caught.value)
    assert not [p for p in (empty / "cache").rglob("*") if p.is_file()]


def test_system_folders_are_looked_in(empty):
    (empty / "system").mkdir()
    (empty / "system" / "a.bin").write_bytes(CONTENT)
    (path,) = find([remote("http://127.0.0.1:9/a.bin")], system=(str(empty / "system"),))
    assert path == empty / "system" / "a.bin"
