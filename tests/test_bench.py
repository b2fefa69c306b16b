"""The benchmarks run at toy sizes: every variant that needs no further package, and one of them from the command line."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


def opened(name, monkeypatch):
    """bench/NAME.py as a module; by path, since bench/rollout.py has the sampler's name."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.syspath_prepend(str(BENCH.parent))
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name, args",
    [
        ("prefix", (True, 16, "bf16", True)),
        ("train_step", ("ours", True)),
        ("rollout", ("ours", "tiny", True)),
        ("rollout", ("generate", "tiny", True)),
        ("rollout", ("in turn", "tiny", True)),
        ("rollout", ("side by side", "tiny", True)),
        ("scaling", ("turns", 2, True)),
        ("scaling", ("context", 128, True)),
    ],
)
def test_a_variant_runs(name, args, monkeypatch):
    bench = opened(name, monkeypatch)
    if "generate" in args:
        pytest.importorskip("transformers")
    monkeypatch.setattr("rollout._apart", sys.modules["rollout"]._apart)  # "in turn" replaces it
    got = sys.modules["measure"].once(bench.setup(*args))
    assert got["wall"] > 0 and got["cpu"] > 0 and got["bytes"] >= 0
    if name == "rollout":  # what was recorded is what was done
        talks = bench.dialogues(8, 3, 512)
        agent, user = (
            sum(part) for part in zip(*((n, len(heard)) for turns in talks for heard, n in turns), strict=True)
        )
        assert got["tokens"] == agent + (user if "sum" in got else 0)


def test_from_the_command_line(tmp_path):
    out = tmp_path / "rows.json"
    command = [sys.executable, str(BENCH / "prefix.py"), "--quick", "--threads", "1", "--dtypes", "fp32"]
    done = subprocess.run(
        [*command, "--prompts", "16", "--json", str(out)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert {tuple(r) for r in rows} == {("name", "value", "unit", "against", "promise", "met")}
    assert any("speed-up" in r["name"] and r["value"] > 0 for r in rows)
