"""`pytest --mutant NAME`: the same tests on a copy of the checkout with a planted bug (tests/mutants.py)."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # so that `pytest` finds the checkout as `python -m pytest` does


def pytest_addoption(parser):
    parser.addoption("--mutant", metavar="NAME", help="run the tests on a copy with this planted bug; they must fail")


def pytest_collection_modifyitems(config, items):
    if "slow" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="minutes long: pytest -m slow"))


def pytest_cmdline_main(config):
    if not (name := config.getoption("--mutant")):
        return None
    from mutants import MUTANTS, planted, run_tests

    if name not in MUTANTS:
        raise pytest.UsageError(f"--mutant {name}: choose one of {', '.join(MUTANTS)}")
    arguments = [a for a in config.invocation_params.args if a not in ("--mutant", name, f"--mutant={name}")]
    with planted(name) as copy:
        return run_tests(copy, [a.replace(str(ROOT), str(copy)) for a in arguments], name).returncode
