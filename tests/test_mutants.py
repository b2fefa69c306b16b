"""The list of planted bugs is alive: each line and each test still exist, and planting leaves the checkout alone."""

import ast
import os
import re

import pytest
from mutants import MUTANTS, ROOT, planted, run_tests

pytestmark = pytest.mark.skipif(bool(os.environ.get("MUTANT")), reason="this copy has a planted bug")


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_still_has_its_line_and_its_test(name):
    mutant = MUTANTS[name]
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.before) == 1 and mutant.before != mutant.after
    ast.parse(text.replace(mutant.before, mutant.after))
    file, test = mutant.test.split("::")
    assert re.search(rf"^def {test}\(", (ROOT / "tests" / file).read_text(), re.M)


def test_planting_changes_one_line_of_a_copy_and_the_named_test_fails_there():
    name = "std_of_a_sample"
    mutant = MUTANTS[name]
    with planted(name) as copy:
        ours, theirs = ((folder / mutant.file).read_text().splitlines() for folder in (ROOT, copy))
        assert [a == b for a, b in zip(ours, theirs, strict=True)].count(False) == 1
        for other in ("rollout.py", "tests/mutants.py", "domains/shop.py"):
            assert (copy / other).read_bytes() == (ROOT / other).read_bytes()
    done = run_tests(ROOT, ["--mutant", name, f"tests/{mutant.test}"], capture_output=True, text=True)
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout
    assert run_tests(ROOT, ["--mutant", "nobody"], capture_output=True, text=True).returncode == 4


def test_there_are_bugs_of_every_part():
    assert len(MUTANTS) >= 24 and {m.file for m in MUTANTS.values()} >= {
        "grpo.py", "rollout.py", "model.py", "chat.py", "tools.py", "kernels/logprob.py"}  # fmt: skip
