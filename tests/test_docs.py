"""Every Python example of the documentation runs as printed, and every link leads somewhere."""

import ast
import re
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import holonomic

# The examples are small: threads would only wait for each other (and for other test workers).
torch.set_num_threads(1)

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKDOWN = sorted(
    {
        *ROOT.glob("*.md"),
        *(p for d in ("docs", "results", "benchmarks") for p in (ROOT / d).rglob("*.md")),
    }
)

_FENCE = re.compile(r"^(`{3,})(\w*)[^\n]*\n(.*?)^\1[ ]*$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run:(.*?)-->\s*\Z", re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+(?:\([^()\s]*\))?)(?:\s+\"[^\"]*\")?\)")


@dataclass(frozen=True)
class Block:
    """A Python example: the line its code starts on, its code, and why it is not run, if so."""

    line: int
    code: str
    not_run: str | None


def blocks(text: str) -> list[Block]:
    """The Python examples of a page, in order.

    >>> [(b.line, b.code, b.not_run) for b in blocks("a\\n```python\\nx = 1\\n```\\n")]
    [(3, 'x = 1\\n', None)]
    """
    found = []
    for match in _FENCE.finditer(text):
        if match[2] == "python":
            excuse = _NOT_RUN.search(text[: match.start()])
            line = text.count("\n", 0, match.start(3)) + 1
            found.append(Block(line, match[3], excuse[1].strip() if excuse else None))
    return found


def slug(heading: str) -> str:
    """The anchor of a heading, as the usual Markdown renderers make it."""
    words = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return words.replace(" ", "-")


def prose(text: str) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text))


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# ---------------------------------------------------------------------- examples
@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page, in order, in one namespace, in an empty folder."""
    monkeypatch.chdir(tmp_path)  # examples save files
    namespace: dict[str, object] = {"__name__": f"docs_{page.stem}"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.not_run is None:
                run(page, block, namespace)


def run(page: Path, block: Block, namespace: dict[str, object]) -> None:
    """Execute a block so that its lines are numbered as in the page."""
    source = "\n" * (block.line - 1) + block.code
    try:
        exec(compile(source, str(page), "exec"), namespace)
    except Exception as error:
        inside = [
            f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(page)
        ]
        line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None
        line = line or (inside[0] if inside else block.line)
        pytest.fail(
            f"{shown(page)}:{line}: {type(error).__name__}: {error}\n\n{traceback.format_exc()}"
        )


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_examples_not_run_say_why(page: Path) -> None:
    """An example may be left out for a reason; it must still be Python."""
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.not_run is not None:
            where = f"{shown(page)}:{block.line}"
            assert len(block.not_run.split()) >= 3, f"{where}: give the reason after 'not run:'"
            ast.parse(block.code, filename=where)


def test_there_are_examples() -> None:
    """A broken pattern must not pass for a page without examples."""
    counts = {shown(p): len(blocks(p.read_text(encoding="utf-8"))) for p in PAGES}
    for page in ("README.md", "docs/choosing.md", "docs/extending.md", "docs/recipes.md"):
        assert counts[page], f"no example was found in {page}"


def test_failure_names_file_and_line() -> None:
    page = ROOT / "README.md"
    with pytest.raises(pytest.fail.Exception, match=r"README\.md:12: ZeroDivisionError"):
        run(page, Block(11, "x = 1\nx / 0\n", None), {})


# ---------------------------------------------------------------------- links
@pytest.mark.parametrize("page", MARKDOWN, ids=shown)
def test_links(page: Path) -> None:
    """Relative links lead to files, and anchors to headings."""
    broken = []
    for target in _LINK.findall(prose(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            broken.append(f"{target}: no such file")
        elif anchor and file.suffix == ".md":
            text = _FENCE.sub("", file.read_text(encoding="utf-8"))
            headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            if anchor not in map(slug, headings):
                broken.append(f"{target}: no such heading")
    assert not broken, f"{shown(page)}: " + "; ".join(broken)


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    listed = set(_LINK.findall(index))
    missing = [p.name for p in PAGES[1:] if p.name != "README.md" and p.name not in listed]
    assert not missing, f"docs/README.md does not list {', '.join(missing)}"


# ---------------------------------------------------------------------- house files
def test_versions_agree() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^version: {re.escape(holonomic.__version__)}$", citation, re.MULTILINE)
    assert f"## [{holonomic.__version__}]" in changelog
