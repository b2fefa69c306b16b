"""docs/evidence.md says what the CSVs beside it say."""

import csv
import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
TESTS = "lm", "scripted", "stranger", "lm, tools fail"  # the table's columns
ROWS = {  # the table's rows, as the CSVs name them
    "the main job": "main job",
    "no cold start": "no cold start",
    "scripted user": "scripted user",
    "pool": "pool of both",
    "user and tool": "user tokens trained",
    "std over": "std over the batch",
    "no std": "no std",
    "KL 0": "KL 0",
    "KL 0.001": "KL 0.001",
    "KL 0.01": "KL 0.01",
    "tools that fail": "faulty tools",
    "credit by turn": "credit by turn",
}


def measured():
    """{(variant, test): success of each seed in %}"""
    found = {}
    for path in (DOCS / "evidence").glob("*.csv"):
        with open(path) as file:
            for row in csv.DictReader(file):
                if row.get("variant") and row["success"]:
                    found.setdefault((row["variant"], row["test"]), {})[row["seed"]] = 100 * float(row["success"])
    assert all(len(seeds) == 3 for seeds in found.values())
    return {key: list(seeds.values()) for key, seeds in found.items()}


def test_the_table_of_the_docs_is_the_csvs():
    values, seen = measured(), set()
    for line in (DOCS / "evidence.md").read_text().splitlines():
        name, *cells = (c.strip(" *") for c in line.strip("|").split("|"))
        if len(cells) != len(TESTS) or not re.match(r"[\d–]", cells[1]):
            continue
        if name.startswith("nothing"):
            variant, after = "main job", ", before RL"
        else:
            variant, after = ROWS[max((k for k in ROWS if name.startswith(k)), key=len)], ""
        seen.add((variant, after))
        for test, cell in zip(TESTS, cells, strict=True):
            seeds = values.get((variant, test + after))
            if seeds is None:
                assert cell == "–"
                continue
            mean, low, high = map(float, re.findall(r"[\d.]+", cell))
            assert (
                abs(mean - sum(seeds) / 3) < 0.06 and abs(low - min(seeds)) <= 0.51 and abs(high - max(seeds)) <= 0.51
            )
    assert seen == {(v, "") for v in ROWS.values()} | {("main job", ", before RL")}
