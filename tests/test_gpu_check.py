"""bench/gpu_check.py, as far as a machine without a GPU can tell: it says so, and every line of it runs on tiny sizes."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "bench" / "gpu_check.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run bench/gpu_check.py itself")
def test_without_a_gpu_it_says_so_and_is_content(script, capsys):
    assert script.main([]) == 0
    assert "no CUDA device" in capsys.readouterr().out


def test_a_dry_run_on_the_cpu_passes_every_check(script, tmp_path, capsys):
    table = tmp_path / "table.json"
    assert script.main(["--device", "cpu", "--quick", "--json", str(table)]) == 0, capsys.readouterr().out
    rows = {row["name"]: row for row in json.loads(table.read_text())}
    assert all(math.isfinite(row["value"]) and row["met"] is not False for row in rows.values())
    for part in ("worst gradient", "peaked", "d weight", "train, adapters: resumed", "training step", "peak memory"):
        assert any(part in name for name in rows), part


def test_a_wrong_gradient_is_missed_by_no_bound(script, monkeypatch, capsys):
    """The check can fail: with a backward pass that drops one block's share of the gradient it does."""
    inner = script.random_model

    def broken(shape, dtype, device, head=1.0):
        model = inner(shape, dtype, device, head)
        if dtype == torch.bfloat16:
            model.model["layers"][1].mlp.up_proj.weight.register_hook(lambda gradient: gradient * 1.3)
        return model

    monkeypatch.setattr(script, "random_model", broken)
    script.parity(script.sizes("cpu", True))
    assert [row["name"] for row in script.ROWS if row["met"] is False] == ["worst gradient's error, torch.bfloat16"]
