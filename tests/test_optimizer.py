"""torchao's 8-bit AdamW as the optimizer of reinforcement learning: against torch's, its memory, and resuming."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_run import small_run

import config
import grpo
import mua_rl
import plan
from run import optimizer_tensors, restore_optimizers

torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="the package torchao is not installed")


def parameters(dtype=torch.float32):
    """A matrix with 8-bit moments, one too small for them, and a vector."""
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in ((64, 256), (60, 70), (9,))]


def steps(trained, optimizer, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        sum((p * torch.randn(p.shape, generator=generator).to(p.dtype)).sum() for p in trained).backward()
        grpo.set_lr(optimizer, 1e-2 / (1 + step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@torchao
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bit_moments_step_as_torchs_adamw_but_for_their_rounding(dtype):
    ours, theirs, start = parameters(dtype), parameters(dtype), parameters(dtype)
    eight, exact = grpo.adamw(ours, 1.0, "adamw8bit"), grpo.adamw(theirs, 1.0)
    assert all(torch.equal(p, q) for p, q in zip(ours, start, strict=True))  # making the moments moved nothing
    masters = [grpo.trained_by(o) for o in (eight, exact)]
    steps(ours, eight, 0, 1), steps(theirs, exact, 0, 1)  # the first step uses the moments before they are rounded
    for p, q in zip(*masters, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
    steps(ours, eight, 1, 9), steps(theirs, exact, 1, 9)
    for p, q, half, before, bound in zip(*masters, ours, start, (0.02, 1e-5, 1e-5), strict=True):
        assert torch.equal(half, p.to(dtype))
        assert (p - q).norm() <= bound * (q - before.float()).norm()  # the two small ones have fp32 moments


@torchao
def test_8_bit_moments_take_a_quarter_of_the_memory_and_what_the_plan_says():
    trained = [torch.nn.Parameter(torch.zeros(512, 1024))]
    held = {}
    for kind in ("adamw", "adamw8bit"):
        optimizer = grpo.adamw(trained, 1e-3, kind)
        steps(trained, optimizer, 0, 1)
        held[kind] = sum(t.numel() * t.element_size() for t in optimizer_tensors([optimizer]).values())
        assert held[kind] == pytest.approx(512 * 1024 * plan.MOMENTS[kind], rel=3e-3)
    assert held["adamw8bit"] < 0.26 * held["adamw"]


@torchao
def test_a_restored_optimizer_goes_on_with_the_same_bits(tmp_path):
    whole, broken = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer, stopped = grpo.adamw(whole, 1.0, "adamw8bit"), grpo.adamw(broken, 1.0, "adamw8bit")
    steps(whole, optimizer, 0, 6)
    steps(broken, stopped, 0, 3)
    save_file(optimizer_tensors([stopped]), tmp_path / "optimizer.safetensors")
    again = [torch.nn.Parameter(p.detach().clone()) for p in broken]
    resumed, tensors = grpo.adamw(again, 1.0, "adamw8bit"), load_file(tmp_path / "optimizer.safetensors")
    restore_optimizers([resumed], dict(tensors), tmp_path)
    steps(again, resumed, 3, 6)
    assert all(torch.equal(p, q) for p, q in zip(whole, again, strict=True))
    ours, theirs = optimizer_tensors([resumed]), optimizer_tensors([optimizer])
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert "0.0.exp_avg.codes" in ours and "0.1.exp_avg" in ours
    del tensors["0.0.exp_avg.scale"]
    with pytest.raises(mua_rl.UserError, match="does not fit the model"):
        restore_optimizers([resumed], tensors, tmp_path)


@torchao
def test_a_run_with_8_bit_moments_resumes_to_the_same_bits(tmp_path, monkeypatch):
    flags = ["--dtype", "bf16", "--optimizer", "adamw8bit", "--width", "64", "--mlp", "64", "--eval-every", "0"]
    whole = small_run(tmp_path / "whole", monkeypatch, *flags)
    broken = small_run(tmp_path / "broken", monkeypatch, *flags, stop_at=2)
    assert json.loads((broken / "checkpoint" / "state.json").read_text())["step"] == 2
    small_run(broken, monkeypatch)
    for name in ("model.safetensors", "optimizer.safetensors"):
        x, y = load_file(whole / "checkpoint" / name), load_file(broken / "checkpoint" / name)
        assert x.keys() == y.keys() and x and all(torch.equal(x[k], y[k]) for k in x), name
    assert any(k.endswith(".exp_avg.codes") for k in x)


def test_without_torchao_it_is_one_line(monkeypatch):
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(mua_rl.UserError, match="--optimizer adamw8bit: the package torchao is not installed") as error:
        mua_rl.main(["train", "--optimizer", "adamw8bit"])
    assert "\n" not in str(error.value)
    with pytest.raises(mua_rl.UserError, match="--optimizer sgd: choose"):
        mua_rl.main(["train", "--optimizer", "sgd"])
