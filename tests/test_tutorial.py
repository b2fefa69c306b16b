"""docs/tutorial.md cannot rot: its links name symbols that are there, its blocks run, its numbers are those of the code."""

import ast
import csv
import functools
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
DOC = ROOT / "docs" / "tutorial.md"
TEXT = DOC.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S)
CHAPTERS = re.split(r"^## (?=\d+ |Answers)", TEXT, flags=re.M)[1:-1]
LINKS = re.findall(r"\[`?([^\]`]+)`?\]\(([^)]+)\)", TEXT)


@functools.cache
def symbols(path: Path) -> set[str]:
    """Functions, classes, their members and the names assigned in a file: f, Class, Class.method, NAME."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        names += [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        found |= set(names)
        if isinstance(node, ast.ClassDef):
            inner = [m.name for m in node.body if isinstance(m, ast.FunctionDef)]
            found |= {f"{node.name}.{m}" for m in inner}
    return found


def anchor(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return "#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_link_leads_to_a_symbol_that_is_there():
    code = 0
    for label, target in LINKS:
        file, hash, section = target.partition("#")
        path = (DOC.parent / file).resolve() if file else DOC
        assert path.exists(), target
        if hash:
            assert f"#{section}" in {anchor(h) for h in re.findall(r"^#+ (.+)$", path.read_text(), re.M)}, target
        if path.suffix == ".py" and "/" not in label and label != path.stem:
            name = label.removeprefix(f"{path.stem}.")
            assert name in symbols(path), f"{label}: no {name} in {target}"
            code += 1
    assert code > 50


def test_every_chapter_has_code_to_run_links_an_equation_and_an_exercise():
    assert len(CHAPTERS) == 13
    for chapter in CHAPTERS:
        title = chapter.splitlines()[0]
        assert "**Exercise.**" in chapter, title
        assert re.search(r"^ {4,}\S.*[=≤+]", re.sub(r"```.*?```", "", chapter, flags=re.S), re.M), (
            f"{title}: no equation"
        )
        assert "](../" in chapter or title.startswith("11"), title
        assert "```python" in chapter or title.startswith("11"), title
        assert f"[{title}]({anchor(title)})" in TEXT, title  # it is in the reading order


@pytest.mark.parametrize("n", range(len(BLOCKS)))
def test_every_block_runs(n, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    assert "assert" in BLOCKS[n]
    try:
        exec(compile(BLOCKS[n], f"tutorial block {n + 1}", "exec"), {"__name__": "__main__"})
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_planted_bugs_are_those_of_the_list():
    from mutants import MUTANTS

    chapter = CHAPTERS[11]
    symptoms = dict(re.findall(r"^(\d+)\. (.+)$", chapter.partition("| # |")[0], re.M))
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| .+ \|$", chapter, re.M)
    assert len(rows) == len(symptoms) == 12
    for number, name in rows:
        assert symptoms[number] == MUTANTS[name].symptom, name
    named = set(re.findall(r"mutants? `(\w+)`(?:, `(\w+)`)?", TEXT))
    assert {name for pair in named for name in pair if name} <= MUTANTS.keys()


def measured():
    sys.path[:0] = [str(ROOT / "bench")]
    try:
        import tutorial_plots
    finally:
        sys.path.pop(0)
    torch.set_default_dtype(torch.float64)
    return tutorial_plots


@pytest.fixture
def float64():
    yield
    torch.set_default_dtype(torch.float32)


def test_the_noise_of_each_baseline_is_as_measured(float64):
    missing = [line for line in measured().noise_table() if line not in TEXT]
    assert not missing, "docs/tutorial.md is stale: paste what `python bench/tutorial_plots.py` prints"


def test_the_four_steps_are_as_measured(float64):
    bench = measured()
    missing = [line for line in [*bench.training_table()[0], *bench.squeezed_table()] if line not in TEXT]
    assert not missing, "docs/tutorial.md is stale: paste what `python bench/tutorial_plots.py` prints"


@pytest.mark.parametrize("page", ["tutorial", "main_job"])
def test_the_users_faults_are_those_of_the_evidence(page):
    with open(ROOT / "docs" / "evidence" / "main_job.csv") as file:
        *rates, last = [f"{100 * float(row['user_fault_rate']):.1f}" for row in csv.DictReader(file)]
    written = f"{', '.join(rates)} and {last} % of the talks"
    assert written in (ROOT / "docs" / f"{page}.md").read_text(), f"docs/{page}.md is stale: write {written}"
