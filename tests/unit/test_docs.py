"""The pages: each is in the site's navigation, links and anchors lead somewhere, and pages stay readable."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FRONT = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "sample_traces/README.md"]
GENERATED = {DOCS / name for name in ("json.md", "schema.md", "support.md", "reference/edits.md")}
TABLES = {DOCS / "accuracy.md": 7500, DOCS / "performance.md": 2500}  # measurements: one page of tables each
MAX_WORDS, MAX_WORDS_OF_A_PAGE = 45_000, 2000
SOURCES = {".py", ".sh", ".toml", ".js", ".html"}
_FENCE = re.compile(r"(?ms)^(```|~~~).*?^\1\s*$")
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_NAMED = re.compile(r"(?<![\w/.-])docs/[\w/-]+\.md")


def prose(path: Path) -> str:
    """Return a page without its blocks of code."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    return "\n".join(line for line in text.splitlines() if not line.startswith("    "))


@cache
def anchors(path: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as the site makes them."""
    seen: Counter[str] = Counter()
    found = []
    for title in re.findall(r"(?m)^#+ (.*)$", prose(path)):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
        words = re.sub(r"[^\w\s-]", "", plain.encode("ascii", "ignore").decode()).strip().lower()
        slug = re.sub(r"[-\s]+", "-", words)
        found.append(f"{slug}_{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return frozenset(found)


def broken(page: Path) -> list[str]:
    """Return the links of a page that lead nowhere."""
    found = []
    for target in _LINK.findall(prose(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        outside = DOCS in page.parents and DOCS not in there.parents
        if outside or not there.exists() or (anchor and anchor not in anchors(there)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


@pytest.mark.parametrize("name", FRONT)
def test_every_link_beside_the_site_leads_somewhere(name: str) -> None:
    assert broken(ROOT / name) == []


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"(?m)^ *- [^:]+: (\S+\.md)$", navigation)
    assert Counter(listed) == Counter(str(page.relative_to(DOCS)) for page in PAGES)


def test_every_page_that_code_and_text_name_exists() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [Path(name) for name in listed.stdout.splitlines()]
    read = [path for path in paths if path.suffix in SOURCES or path.name in ("Makefile", *FRONT)]
    lost = [
        f"{path}: {name}"
        for path in read
        if (ROOT / path).is_file() and not (ROOT / path).is_symlink()
        for name in _NAMED.findall((ROOT / path).read_text(encoding="utf-8", errors="replace"))
        if not (ROOT / name).is_file()
    ]
    assert lost == []


OF_ANY_PAGE = ("make demo", "dpro RUN", "srun dpro record -o /shared/RUN --", "dpro report RUN --html FILE")
TASKS = [row for row in (DOCS / "index.md").read_text(encoding="utf-8").splitlines() if row.startswith("| ")]


@pytest.mark.parametrize("row", TASKS, ids=lambda row: row.split("|")[1].strip())
def test_commands_of_the_first_page_are_those_of_the_page_that_it_leads_to(row: str) -> None:
    _, _, commands, pages, _ = row.split("|")
    text = "".join((DOCS / page).read_text(encoding="utf-8") for page in re.findall(r"\]\(([^)#]+)", pages))
    for command in re.findall("`([^`]+)`", commands):
        assert (command := command.removesuffix(" …")) in text or command in OF_ANY_PAGE


def num_words(page: Path) -> int:
    """Return how many words a page has, bars of tables included."""
    return len(page.read_text(encoding="utf-8").split())


@pytest.mark.parametrize("page", sorted({*PAGES} - GENERATED), ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_can_be_read_in_ten_minutes(page: Path) -> None:
    assert num_words(page) <= TABLES.get(page, MAX_WORDS_OF_A_PAGE)


def test_what_a_user_reads_is_no_book() -> None:
    assert sum(map(num_words, [ROOT / "README.md", *({*PAGES} - GENERATED)])) <= MAX_WORDS


@pytest.mark.parametrize("page", sorted(GENERATED), ids=lambda page: page.name)
def test_generated_pages_come_last_in_the_search(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith(("---\nsearch:\n  boost: 0.1\n---\n", "---\nsearch:\n  exclude: true\n---\n"))


@pytest.mark.parametrize(("name", "lines"), [("README.md", 90), ("CHANGELOG.md", 200)])
def test_what_a_visitor_reads_first_is_short(name: str, lines: int) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= lines


def test_install_lines_are_of_a_checkout() -> None:
    """There is no release on an index."""
    pages = [*PAGES, *(ROOT / name for name in FRONT)]
    wrong = [page.name for page in pages if re.search(r"pip install \"?'?dpro", page.read_text("utf-8"))]
    assert wrong == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# A `b` c\n\n[x](#a-b-c) [y](#none) [z](b.md)\n\n    [code](c.md)\n")
    assert broken(tmp_path / "a.md") == ["#none", "b.md"]
