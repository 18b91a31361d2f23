"""Figures in README and docs: each stands in the table of results that its paragraph names, which names its command."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "howto").glob("*.md"))]
NUMBER = re.compile(r"(?<![\w.,/])[-−]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?![\w/])")
TABLE = re.compile(r"results/(\w+)(?:\.md|\.csv)")


def numbers(text: str) -> list[str]:
    """All numbers, without signs and separators of thousands."""
    found = (match.group().lstrip("-−").replace(",", "") for match in NUMBER.finditer(text))
    return [number for number in found if number]


def paragraphs(page: Path) -> list[tuple[set[str], str]]:
    """Paragraphs, list entries and rows of tables with the results that they cite; rows of README, what is above."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found, above = [], set()
    for paragraph in re.split(r"\n\s*\n|\n(?=[-*|] ?)", text):
        named = set(TABLE.findall(paragraph))
        if not named and not (page.name == "README.md" and paragraph.startswith("|")):
            above = set()
        above = named or above
        found.append((above, re.sub(r"`[^`]*`|\([^)]*\.md[^)]*\)", "", paragraph)))
    return found


def rows(name: str) -> list[float]:
    """All numbers of a table of results."""
    texts = [path.read_text(encoding="utf-8") for path in RESULTS.glob(f"{name}.md")]
    texts += [path.read_text(encoding="utf-8").replace(",", " ") for path in RESULTS.glob(f"{name}.csv")]
    return [float(number) for text in texts for number in numbers(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_figures_are_those_of_the_results_that_are_named(page: Path) -> None:
    """To the digits that the page prints; whole numbers may be sizes, so only README's tables are held to them."""
    missing = []
    for names, text in paragraphs(page):
        values = [value for name in names for value in rows(name)]
        figures = page.name == "README.md" and text.count("|") == 4  # a row of three cells, the second of which counts
        for number in numbers(text.split("|")[2] if figures else text) if names else []:
            digits = len(number.partition(".")[2])
            if (digits or figures) and not any(round(value, digits) == float(number) for value in values):
                missing.append((number, sorted(names), text[:80]))
    assert missing == []


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.md")), ids=lambda path: path.stem)
def test_results_name_a_command_that_exists(path: Path) -> None:
    scripts = re.findall(r"`(?:\w+=\S+ )*python (\S+\.py)", path.read_text(encoding="utf-8"))
    assert scripts
    assert [script for script in scripts if not (ROOT / script).exists()] == []


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.md")), ids=lambda path: path.stem)
def test_results_open_with_their_finding(path: Path) -> None:
    """The site puts the sentence of the page on benchmarks and the first table, which no heading precedes, on top."""
    contents = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert re.search(rf"^.+ <results/{path.stem}>$", contents, re.MULTILINE)
    assert re.search(rf"^\| \[[^]]*\]\(results/{path.stem}\.md\) \| .+\. \|$", contents, re.MULTILINE)
    above = path.read_text(encoding="utf-8").partition("\n|")[0]
    assert not re.search(r"^#", re.sub(r"\A# .*\n", "", above), re.MULTILINE)
