"""The cold start: demonstrations of a scripted agent and user, as token rows of both sides, and an SFT step on them."""

import random
from collections.abc import Iterable

import torch

import model as models
from chat import Call, Chat, Context, turn_text
from config import Config
from evaluation import user_prompt
from grpo import Batch, Guard, backward, followed, logprobs, masters, micro_batches, ramp, set_lr, trained_by
from tools import Domain, Task, play


def demonstration(domain: Domain, task: Task, side: str, rng: random.Random) -> list:
    """One talk of a scripted agent, from whom `side` ("agent" or "user") can learn, with the scripted user (`tools.play`)."""
    return play(domain.demonstrator(rng, side), domain.script(task, rng), domain.world(task))


def agent_view(domain: Domain, chat: Chat, talk: list) -> Context:
    """A talk as the agent lives it: its messages and calls are AGENT tokens."""
    ctx = chat.start(domain.system, domain.tools, (0,))
    for who, what in talk:
        if who == "user":
            chat.hear(ctx, what)
        elif who == "tool":
            chat.observe(ctx, [what])
        else:
            chat.speak(ctx, turn_text([what], "", chat.style) if isinstance(what, Call) else what)
    return ctx


def user_view(domain: Domain, chat: Chat, task: Task, talk: list) -> Context:
    """A talk as the user lives it: its own messages are AGENT tokens, and it sees no tools."""
    ctx = chat.start(user_prompt(domain, task), None, (0,))
    chat.hear(ctx, domain.greeting)
    for who, what in talk:
        if who == "user":
            chat.speak(ctx, what)
        elif who == "agent":
            chat.hear(ctx, what)
    return ctx


def sft_rows(domain: Domain, chat: Chat, cfg: Config, step: int) -> list[Context]:
    """The fresh demonstrations of a cold-start step. Agent and user learn from demonstrators and tasks of their own (in
    the shop the user's reads back more, and there is more of what is hard for a user). No talk is seen twice.
    """
    rows: list[Context] = []
    for i in range(step * cfg.sft_talks, (step + 1) * cfg.sft_talks):
        rng = random.Random(f"demo {cfg.seed} {i}")
        task = domain.practice_task("agent", cfg.seed, i)
        rows.append(agent_view(domain, chat, demonstration(domain, task, "agent", rng)))
        task = domain.practice_task("user", cfg.seed, 500_000 + i)
        rows.append(user_view(domain, chat, task, demonstration(domain, task, "user", rng)))
    return rows


def tokenizer_texts(domain: Domain, seed: int, n: int = 3000) -> Iterable[str]:
    """What the tokenizer is trained on: payloads of training talks, and the template's words."""
    yield from ["system\n", "user\n", "assistant\n"] * 2
    for i in range(n):
        task = domain.task("train", seed, i)
        yield domain.instruction(task)
        for who, what in demonstration(domain, task, "agent", random.Random(f"demo {seed} {i}")):
            yield turn_text([what]).removeprefix("<tool_call>").removesuffix("</tool_call>") if who == "call" else what


def sft_optimizers(policy: models.Decoder, cfg: Config) -> list[torch.optim.Optimizer]:
    """From scratch: Muon for the matrices inside the blocks, AdamW for embeddings and norms. Pretrained: AdamW for all."""
    by_muon = lambda name, p: not cfg.model and p.dim() == 2 and "embed" not in name and "lm_head" not in name
    matrices = [p for name, p in policy.named_parameters() if by_muon(name, p)]
    rest = [p for name, p in policy.named_parameters() if not by_muon(name, p)]
    adam = torch.optim.AdamW(masters(rest), lr=cfg.sft_lr_rest, betas=(0.9, 0.95), weight_decay=0.01)
    muon = [torch.optim.Muon(masters(matrices), lr=cfg.sft_lr, momentum=0.95, weight_decay=0.0)] if matrices else []
    return [followed(optimizer) for optimizer in (*muon, adam)]


def sft_step(
    policy: models.Decoder, optimizers: list, rows: list[Context], cfg: Config, step: int, guard: Guard
) -> dict:
    """One cold-start step: cross-entropy on each speaker's own tokens (role AGENT in its own view)."""
    factor = ramp(step, cfg.sft_steps, 20, cfg.sft_cooldown, 0.02)
    for optimizer, lr in zip(optimizers, (cfg.sft_lr, cfg.sft_lr_rest)[-len(optimizers) :], strict=True):
        set_lr(optimizer, lr * factor)
    batches = micro_batches(rows, [0.0] * len(rows), cfg.micro_tokens)
    tokens = sum(len(b.targets) for b in batches)

    def loss_of(batch: Batch) -> tuple[torch.Tensor, float]:
        loss = -logprobs(policy, batch)[0].sum() / tokens
        return loss, float(loss.detach())

    total = sum(backward(loss_of, batches, policy))
    norm = float(torch.nn.utils.clip_grad_norm_([p for o in optimizers for p in trained_by(o)], cfg.grad_clip))
    passes = guard.passes(total, norm, batches, f"cold-start{step}")
    for optimizer in optimizers:
        if passes:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    values = {"loss": total, "tokens": tokens, "grad_norm": norm, "all_tokens": sum(len(r.ids) for r in rows)}
    return values if passes else values | {"skipped_updates": 1}
