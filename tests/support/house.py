"""`make house`: measure the code's layout at two commits and draw its rooms.

Prints one table and writes the picture of docs/internals/architecture.md, which a test compares with what
the code has.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "internals" / "architecture.md"
BEFORE = "461965d"
"""The last commit before the rooms were laid out."""
BEGIN, END = "<!-- rooms: written by `make house` -->", "<!-- end of rooms -->"
_SAYS_NOTHING = re.compile(
    r"(What|Of|As|Where|The same|By|Until|Its|Whose|For|From|How|In|On|At|With|Without|When|Which|Who|Why|"
    r"None|Not|Nothing|Nobody|Somebody|Others?|It|They|These|Once)\b"
)
_JOURNEYS_BEFORE = "62 / 30 / 47"
"""Files on the way of a save, a deletion and a resume at `BEFORE`, counted by hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What is counted of one commit."""

    lines: int
    files: int
    fullest: int
    circles: int
    in_circles: int
    silent_share: float
    adr_words: int
    changelog_words: int
    journeys: str


NAMES = {
    "journeys": "files on the way: new folder to COMMIT / one deletion / resume",
    "lines": "lines in ckptd/",
    "files": "files in ckptd/",
    "fullest": "entries of the fullest folder",
    "circles": "import circles, imports for types counted",
    "in_circles": "modules in them",
    "silent_share": "docstrings that begin with What, Of, As, It, Nobody …",
    "adr_words": "words of decision records",
    "changelog_words": "words of the changelog",
}


def main(arguments: list[str] | None = None) -> int:
    """Print the table and write the picture."""
    parser = argparse.ArgumentParser(prog="make house", description=__doc__)
    parser.add_argument("--before", default=BEFORE, help="the commit that is compared with")
    asked = parser.parse_args(arguments)
    PAGE.write_text(with_rooms(PAGE.read_text()))
    after = measure(ROOT, journeys_in(PAGE.read_text()))
    with tempfile.TemporaryDirectory(prefix="ckptd-house-") as folder:
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", asked.before, "ckptd", "docs", "CHANGELOG.md"],
            capture_output=True,
            check=True,
        )
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
        before = measure(Path(folder), _JOURNEYS_BEFORE)
    print(f"| | {asked.before} | now |\n|---|---|---|")
    for field in fields(Figures):
        print(f"| {NAMES[field.name]} | {_shown(before, field.name)} | {_shown(after, field.name)} |")
    return 0


def _shown(figures: Figures, name: str) -> str:
    value = getattr(figures, name)
    if isinstance(value, float):
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else str(value)


# --- counting --------------------------------------------------------------------------------------------


def measure(root: Path, journeys: str) -> Figures:
    """Count what a tree holds."""
    paths = [p for p in sorted((root / "ckptd").rglob("*.py")) if "__pycache__" not in p.parts]
    per_folder = Counter(p.parent for p in paths if p.name != "__init__.py")
    per_folder.update(p.parent.parent for p in paths if p.name == "__init__.py" and p.parent.name != "ckptd")
    trees = {p: ast.parse(p.read_text()) for p in paths}
    docs = [doc for tree in trees.values() for doc in _docstrings(tree)]
    found = circles(graph_of(root, for_types=True))
    return Figures(
        lines=sum(p.read_text().count("\n") for p in paths),
        files=len(paths),
        fullest=max(per_folder.values()),
        circles=len(found),
        in_circles=sum(map(len, found)),
        silent_share=sum(bool(_SAYS_NOTHING.match(doc)) for doc in docs) / len(docs),
        adr_words=sum(len(p.read_text().split()) for p in (root / "docs" / "adr").glob("*.md")),
        changelog_words=len((root / "CHANGELOG.md").read_text().split()),
        journeys=journeys,
    )


def journeys_in(page: str) -> str:
    """Count the files that each of the page's journeys links to."""
    sections = re.split(r"(?m)^### ", page.partition("## Three journeys")[2].partition("\n## ")[0])[1:]
    return " / ".join(str(len(set(re.findall(r"\]\([^)]*?(ckptd/[\w/]+\.py)", text)))) for text in sections)


def _docstrings(tree: ast.Module) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [doc for node in ast.walk(tree) if isinstance(node, kinds) and (doc := ast.get_docstring(node))]


def graph_of(root: Path, *, for_types: bool) -> dict[str, set[str]]:
    """Return module → modules that it imports, in functions too; `for_types`: for annotations too."""
    package = root / "ckptd"
    modules = {
        str(p.relative_to(package))[:-3].replace("/", "."): p
        for p in package.rglob("*.py")
        if p.name != "__init__.py"
    }
    return {name: _imports(path, name, modules.keys(), for_types=for_types) for name, path in modules.items()}


def _imports(path: Path, own: str, known: Container[str], *, for_types: bool) -> set[str]:
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
        if not for_types
    }
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or id(node) in skipped:
            continue
        if not str(node.module).startswith("ckptd"):
            continue
        base = str(node.module).removeprefix("ckptd").removeprefix(".")
        for alias in node.names:
            both = (f"{base}.{alias.name}".removeprefix("."), base)
            found |= {name for name in both if name in known}
    return found - {own}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of nodes that reach each other (strongly connected components, by Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted(found)


# --- the picture -----------------------------------------------------------------------------------------


def room_of(module: str) -> str:
    """Return the folder that a module lies in; S3 counts as part of the stores."""
    return module.rpartition(".")[0].removesuffix(".s3") or module


def rooms() -> dict[str, set[str]]:
    """Return room → rooms that it imports when it runs."""
    found: dict[str, set[str]] = {}
    for module, others in graph_of(ROOT, for_types=False).items():
        room = room_of(module)
        found.setdefault(room, set()).update(set(map(room_of, others)) - {room})
    return found


def picture() -> str:
    """Return the rooms as a Mermaid graph: an arrow goes to what is imported, but where others imply it."""
    everywhere = ("errors", "trainer")
    graph = {room: others - set(everywhere) for room, others in rooms().items() if room not in everywhere}
    reach: dict[str, set[str]] = {}

    def reached(room: str) -> set[str]:
        if room not in reach:
            reach[room] = set()
            reach[room] = set().union(*({other} | reached(other) for other in graph.get(room, ())), set())
        return reach[room]

    lines = ["```mermaid", "graph TD"]
    for room in sorted(graph):
        lines += [
            f"    {room.replace('.', '_')}[{room}] --> {other.replace('.', '_')}[{other}]"
            for other in sorted(graph[room])
            if not any(other in reached(third) for third in graph[room] - {other})
        ]
    return "\n".join([*lines, "```"])


def with_rooms(page: str) -> str:
    """Return the page with the picture as the code has it now."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{picture()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    sys.exit(main())
