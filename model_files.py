"""A model's files, in Hugging Face's layout: config.json, safetensors, PEFT adapters, tokenizer and template; GGUF; the Hub.

What is written here opens in `transformers`, `peft` and vLLM, and the other way round. A checkpoint that needs what the
decoder does not have (sliding windows, mixtures of experts, RoPE kinds beyond default/linear/llama3/yarn) is refused with a
`UserError`, never run wrongly.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, pre_tokenizers
from torch import Tensor

from chat import Chat, UserError, parse_json
from model import Decoder, ModelConfig, add_lora, linears


# ---------------------------------------------------------------------------------------------------- whole models
def load_model(folder, dtype=torch.float32, device="cpu") -> Decoder:
    """A Hugging Face folder (config.json, model.safetensors or its shards and index) → Decoder.

    Files are mapped, not read: at most one copy of the weights is in memory, and one shard more while it is converted.
    Raises UserError when the folder is no such thing, the architecture is not ours, or weights and config disagree.
    Weights in pickle files are never opened: a pickle can run any code.
    """
    folder = Path(folder)
    cfg = read_shape(folder)
    tensors = (pair for name in _weight_files(folder) for pair in read_tensors(folder / name))
    return from_tensors(cfg, ((name, t.to(device, dtype)) for name, t in tensors), str(folder))


def save_model(model: Decoder, folder) -> None:
    """Write config.json and model.safetensors. Each is written beside, synced and renamed, so a kill leaves the old file
    or the new one, never half of one. Adapters are not written (`save_adapter` does, `merge_lora` folds them in).
    Raises UserError when the folder can't be written or the disk is full."""
    tensors = {name: p.detach().contiguous() for name, p in model.named_parameters() if ".lora_" not in name}
    config = config_to_hf(model.cfg) | {"dtype": str(model.head.dtype).removeprefix("torch.")}
    write_tensors(Path(folder), "model.safetensors", tensors, "config.json", config)


def fetch(name: str) -> Path:
    """A folder's path, or that of a Hugging Face Hub repository in the Hub's own cache, downloaded if need be.

    HF_HOME, HF_TOKEN and HF_HUB_OFFLINE work as everywhere. Raises UserError when there is no such folder or repository.
    """
    if Path(name).exists():
        return Path(name)
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise UserError(f"{name}: no such folder; give one, or a model's name on the Hub, such as Qwen/Qwen3-0.6B")
    import huggingface_hub  # slow to import, and needed for a Hub name only

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as error:  # of many kinds: no network, no such repository, no access, no space
        why = (str(error).strip() or "no reason").splitlines()[0][:160]
        raise UserError(f"{name}: not a folder here, and the Hub gave: {type(error).__name__}: {why}") from None


# ---------------------------------------------------------------------------------------------------- config.json
def read_shape(folder: Path) -> ModelConfig:
    """The shape in a folder's config.json."""
    hf = read_json(folder / "config.json")
    with _named(folder / "config.json"):
        return config_from_hf(hf)


# What `transformers` assumes for a key that config.json leaves out differs by architecture. None: derived from other keys.
QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
LLAMA = {"num_key_value_heads": None, "max_position_embeddings": 2048, "head_dim": None}
FAMILIES = {
    "qwen3": {"absent": QWEN | {"head_dim": 128}, "qk_norm": True, "qkv_bias": False, "class": "Qwen3ForCausalLM"},
    "qwen2": {"absent": QWEN | {"head_dim": None}, "qk_norm": False, "qkv_bias": True, "class": "Qwen2ForCausalLM"},
    "llama": {"absent": LLAMA, "qk_norm": False, "qkv_bias": False, "class": "LlamaForCausalLM"},
}
ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
ROPE_OPTIONAL = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")  # yarn's
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LIMITS = {"num_hidden_layers": 10_000}  # beyond which a number in a file is a mistake; others: 2^24, of positions too


def config_from_hf(hf: dict) -> ModelConfig:
    """From the dict in a config.json, written by transformers 4 or 5. Raises UserError for what we can't run."""
    kind = hf.get("model_type")
    if kind not in list(FAMILIES):  # a list: what stands in a file need not be hashable
        raise UserError(f"architecture {kind!r} is not supported; use one of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    _refuse_variants(hf)
    theta, scaling = _rope_from_hf(hf)
    size = {key: _positive(hf, key) for key in SIZES}
    heads = size["num_attention_heads"]
    derived = {"num_key_value_heads": heads, "head_dim": size["hidden_size"] // heads}
    hf = {"rms_norm_eps": 1e-6} | family["absent"] | hf
    hf |= {key: value for key, value in derived.items() if hf[key] is None}
    size |= {key: _positive(hf, key) for key in (*derived, "max_position_embeddings")}
    if heads % (kv_heads := size["num_key_value_heads"]):
        raise UserError(f"num_attention_heads = {heads} is no multiple of num_key_value_heads = {kv_heads}; correct it")
    if size["head_dim"] % 2:
        raise UserError(f"head_dim = {size['head_dim']} is odd, RoPE turns pairs; use an even one")
    return ModelConfig(
        kind, **size, rope_theta=theta, rope_scaling=scaling, qk_norm=family["qk_norm"],
        rms_norm_eps=float(_number(hf, "rms_norm_eps")),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        attention_bias=bool(hf.get("attention_bias", False)) or family["qkv_bias"],
    )  # fmt: skip


def config_to_hf(cfg: ModelConfig) -> dict:
    """The dict for config.json. RoPE is spelled twice, so that transformers 4 and 5 both read it."""
    hf = asdict(cfg) | {"architectures": [FAMILIES[cfg.model_type]["class"]], "hidden_act": "silu"}
    hf["rope_parameters"] = {"rope_type": "default", "rope_theta": cfg.rope_theta} | (cfg.rope_scaling or {})
    ours = ("qk_norm", "attention_bias") if cfg.model_type == "qwen2" else ("qk_norm",)  # Qwen2 has its biases always
    return {key: value for key, value in hf.items() if key not in ours}


@contextlib.contextmanager
def _named(place):
    """Puts before a UserError where the wrong value stands."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


def _positive(hf: dict, key: str) -> int:
    value = hf.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LIMITS.get(key, 2**24):
        raise UserError(f"{key} = {value!r:.40} is not a positive whole number of a model's size; correct it")
    return value


def _number(hf: dict, key: str) -> float:
    value = hf.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise UserError(f"{key} = {value!r} is not a positive number; correct it")
    return value


def _refuse_variants(hf: dict) -> None:
    """Anything that would change the arithmetic and that we don't have must stop us, not be skipped."""
    windowed = hf.get("use_sliding_window", hf["model_type"] == "llama") and hf.get("sliding_window")
    kinds = hf.get("layer_types") or []
    if windowed or not isinstance(kinds, list) or any("full" not in str(kind) for kind in kinds):
        window = hf.get("sliding_window")
        raise UserError(f"sliding-window attention ({window!r}) is not supported; use a checkpoint with full attention")
    for key, wanted in {"hidden_act": "silu", "mlp_bias": False, "quantization_config": None}.items():
        if hf.get(key, wanted) != wanted:
            raise UserError(f"{key} = {hf[key]!r} is not supported; use a checkpoint where it is {wanted!r}")


def _rope_from_hf(hf: dict) -> tuple[float, dict | None]:
    """(theta, scaling or None). transformers 4: `rope_theta` beside `rope_scaling`; 5: both in `rope_parameters`."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise UserError(f"rope_parameters = {rope!r} is not supported; use a checkpoint with one RoPE for all layers")
    rope = dict(rope)
    theta = _number({"rope_theta": rope.pop("rope_theta", hf.get("rope_theta", 10000.0))}, "rope_theta")
    if (part := rope.pop("partial_rotary_factor", None) or hf.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UserError(f"partial_rotary_factor = {part!r} is not supported; use a checkpoint where it is 1")
    old = rope.pop("type", None)  # the spelling of old checkpoints
    rope.setdefault("rope_type", old or "default")
    if rope["rope_type"] == "yarn" and hf.get("max_position_embeddings"):
        rope.setdefault("original_max_position_embeddings", hf["max_position_embeddings"])
    if (kind := rope["rope_type"]) not in list(ROPE_KEYS):  # a list: what stands in a file need not be hashable
        raise UserError(f"RoPE kind {kind!r} is not supported; use a checkpoint with one of {', '.join(ROPE_KEYS)}")
    optional = [key for key in ROPE_OPTIONAL if kind == "yarn" and rope.get(key)]  # 0 and null: not given
    for key in (*ROPE_KEYS[kind], *optional):
        with _named(f"RoPE kind {kind!r}"):
            _number(rope, key)
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise UserError("RoPE kind 'llama3' needs low_freq_factor below high_freq_factor; correct config.json")
    return float(theta), (None if kind == "default" else rope)


# ---------------------------------------------------------------------------------------------------- tensors and JSON
def from_tensors(cfg: ModelConfig, tensors: Iterable[tuple[str, Tensor]], where: str) -> Decoder:
    """A Decoder that holds exactly these named tensors. Raises UserError for a missing, surplus or misshapen one."""
    with torch.device("meta"):  # no time and memory for weights that are about to be replaced
        model = Decoder(cfg)
    surplus = ("rotary_emb.inv_freq", *["lm_head.weight"] * cfg.tie_word_embeddings)  # old Llama files; a second copy
    found = {name: tensor for name, tensor in tensors if not name.endswith(surplus)}
    _check_tensors(found, dict(model.named_parameters()), where, "get the whole checkpoint and its own config.json")
    model.load_state_dict(found, assign=True)
    return model


def _check_tensors(found: dict[str, Tensor], wanted: dict[str, Tensor], where, remedy: str) -> None:
    """Raises UserError unless the names and shapes found are those that are wanted."""
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found:
            wrong = "is missing"
        elif name not in wanted:
            wrong = "has no place in this model"
        elif found[name].shape != wanted[name].shape:
            wrong = f"has shape {list(found[name].shape)}, not {list(wanted[name].shape)}"
        else:
            continue
        raise UserError(f"{where}: tensor {name} {wrong}; {remedy}")


def read_json(path: Path, needed: bool = True) -> dict:
    """The object in a JSON file; {} where there is no such file and it is not needed."""
    if not needed and not path.exists():
        return {}
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give a folder that holds a Hugging Face checkpoint") from None
    except (OSError, ValueError) as e:
        raise UserError(f"{path} can't be read as JSON ({e}); restore the file") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; restore the file")
    return value


def _weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files. One with a folder in it could reach outside the checkpoint: refused."""
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = read_json(index).get("weight_map")
        names = sorted({str(n) for n in names.values()}) if isinstance(names, dict) else []
        if not names or any(Path(n).name != n for n in names):
            raise UserError(f"{index} has no usable weight_map; restore the file")
        return names
    if pickles := sorted(p.name for ext in ("bin", "pt", "pth", "ckpt") for p in folder.glob(f"*.{ext}")):
        raise UserError(f"{folder} holds its weights only as a pickle ({pickles[0]}); convert it to safetensors first")
    raise UserError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json; get the weights")


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of one safetensors file, mapped into memory one by one."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist, but is needed; get the whole checkpoint") from None
    except (OSError, SafetensorError) as e:
        raise UserError(f"{path} is cut or damaged ({e}); get the file again") from None


def write_tensors(folder: Path, weights: str, tensors: dict[str, Tensor], about: str, config: dict) -> None:
    """Write named tensors and the JSON that belongs to them. Raises UserError where that can't be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / weights, lambda beside: save_file(tensors, beside, metadata={"format": "pt"}))
        replace_file(folder / about, lambda beside: beside.write_text(json.dumps(config, indent=2) + "\n"))
    except (OSError, SafetensorError) as e:
        raise UserError(f"can't write to {folder} ({e}); free some space or choose another folder") from None


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside the old one, sync it and put it in its place: a kill or a power cut leaves one or the other."""
    beside = path.with_name(path.name + ".part")
    write(beside)
    sync(beside)
    os.replace(beside, path)
    sync(path.parent)  # the new name itself


def sync(path: Path) -> None:
    """Make a file or folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---------------------------------------------------------------------------------------------------- adapters
def _adapters(model: Decoder) -> dict[str, Tensor]:
    """The adapters of a model under PEFT's names."""
    return {
        f"base_model.model.{name}.lora_{letter}.weight": p.detach()
        for name, layer in linears(model)
        for letter, p in (("A", layer.lora_A), ("B", layer.lora_B))
    }


def save_adapter(model: Decoder, folder, base: str) -> None:
    """Write the adapters as `peft` reads them. `base`: where the frozen weights are to be had."""
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "bias": "none",
        "r": model.lora.rank, "lora_alpha": model.lora.alpha, "lora_dropout": 0.0, "inference_mode": True,
        "target_modules": sorted({name.rpartition(".")[2] for name, _ in linears(model)}),
    }  # fmt: skip
    write_tensors(Path(folder), "adapter_model.safetensors", _adapters(model), "adapter_config.json", config)


# Fields of PEFT's LoraConfig that change nothing in how an adapter is applied, or that `load_adapter` follows; and those of
# which it knows some values (EVA and the like only choose where A and B start). Any other field that is set is a variant.
LORA_FIELDS = set(
    "r lora_alpha lora_dropout target_modules exclude_modules base_model_name_or_path task_type inference_mode revision "
    "peft_version auto_mapping runtime_config megatron_core qalora_group_size eva_config".split()
)
LORA_VALUES = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}


def load_adapter(model: Decoder, folder) -> None:
    """Give `model` the adapters in a folder. Raises UserError if they are cut, another model's, or of a kind we don't have:
    whatever would make a layer more than x Wᵀ + (α/r) · x Aᵀ Bᵀ."""
    folder = Path(folder)
    config = read_json(folder / "adapter_config.json")
    with _named(folder / "adapter_config.json"):
        for key, value in config.items():
            if value not in LORA_VALUES[key] if key in LORA_VALUES else value and key not in LORA_FIELDS:
                raise UserError(f"{key} = {value!r} is not supported; merge the adapter into its weights with peft")
        rank, alpha = _positive(config, "r"), _number(config, "lora_alpha")
    found = dict(read_tensors(folder / "adapter_model.safetensors"))
    add_lora(model, rank, alpha)
    wanted = _adapters(model)
    _check_tensors(found, wanted, folder, "give an adapter of this model, on every linear layer")
    for name, p in wanted.items():
        p.copy_(found[name])


# ---------------------------------------------------------------------------------------------------- tokenizer and chat template
def load_chat(folder) -> Chat:
    """From tokenizer.json, tokenizer_config.json or chat_template.jinja; end tokens also from generation_config.json
    and config.json."""
    folder = Path(folder)
    try:
        tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} has no tokenizer.json; give a folder that holds a whole model") from None
    except Exception as error:  # tokenizers raises a bare Exception for bad content
        raise UserError(f"{folder / 'tokenizer.json'} cannot be read: {error}; copy it again") from None
    names = ("tokenizer_config.json", "generation_config.json", "config.json")
    config, generation, model = (read_json(folder / name, needed=False) for name in names)
    template = config.pop("chat_template", None)
    try:
        if (folder / "chat_template.jinja").exists():
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        if isinstance(template, list) and template:  # several named ones
            template = {t["name"]: t["template"] for t in template}.get("default", template[0]["template"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{folder}: its chat template cannot be read ({error!r}); copy it again") from None
    if not template or not isinstance(template, str):
        raise UserError(f"{folder} has no chat template; give an instruct model, or add a chat_template.jinja")
    named = [source.get("eos_token_id") for source in (generation, model)]  # an id, a list of them, or absent
    ends = [i for ids in named for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)]
    return Chat(tokenizer, template, ends, config, generation)


def save_chat(chat: Chat, folder) -> None:
    """Writes what `load_chat`, transformers' AutoTokenizer and vLLM read; all that was in the original stays in it."""
    folder = Path(folder)
    text = chat.tokenizer.to_str(pretty=True)  # its own `save` hides what went wrong with the disk
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    made = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    made |= {"eos_token": chat.end, "pad_token": chat.end}
    config = made | chat.config | {"chat_template": chat.template}
    generation = chat.generation | {"eos_token_id": sorted(chat.end_ids)}
    for name, value in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------------- GGUF
# How text is cut before merging, by the name that stands in a GGUF file (llama.cpp, src/llama-vocab.cpp). The file holds no
# more than the name, and with another cut the same text becomes tokens that the model has never seen.
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLIT = (  # Llama 3 takes up to three digits together, Qwen one
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(digits: str):
    pattern = pre_tokenizers.Split(Regex(SPLIT.replace("DIGITS", digits)), "isolated")
    return pre_tokenizers.Sequence([pattern, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS = {
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _split("{1,3}")),
    "qwen2": _split(""),
}


def _pre_tokenizer(path: Path):
    """The one that a GGUF file names; None, and a warning, where it is not known. A SentencePiece model has none."""
    import gguf

    fields = gguf.GGUFReader(path).fields
    kind, name = (fields[k].contents() if k in fields else None for k in ("tokenizer.ggml.model", "tokenizer.ggml.pre"))
    if kind == "gpt2" and name not in PRE_TOKENIZERS:
        known = f"pre-tokenizer {name!r} is none of {', '.join(PRE_TOKENIZERS)}"
        print(f"warning: {path}: {known}: text may become wrong tokens", file=sys.stderr)
    return PRE_TOKENIZERS.get(name) if kind == "gpt2" else None


def load_gguf(path):
    """A Llama-family GGUF file → (Decoder, tokenizers.Tokenizer, chat template, special tokens).

    `transformers` reads it and turns blocks of 4 bits into numbers, which takes half a minute for 135 M parameters.
    Raises UserError when the file is missing, damaged, or of another architecture.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist; give a GGUF file")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        there, name = path.parent, path.name
        cut = _pre_tokenizer(path)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(there, gguf_file=name, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(there, gguf_file=name)
    except ImportError as error:
        raise UserError(f"{path}: {error}; run `make smol`") from None
    except Exception as error:  # whatever a damaged file makes it stumble over
        raise UserError(f"{path} is no whole GGUF that can be read ({type(error).__name__}: {error})") from None
    if cut is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = cut
    hf = {k: v for k, v in theirs.config.to_dict().items() if k != "quantization_config"}
    hf["rms_norm_eps"] = float(f"{hf['rms_norm_eps']:.6g}")  # kept in fp32 there: 9.99999e-06
    decoder = from_tensors(config_from_hf(hf), theirs.state_dict().items(), str(path))
    return decoder, tokenizer.backend_tokenizer, tokenizer.chat_template, tokenizer.special_tokens_map
