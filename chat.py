"""Chat: messages become tokens, each with a role, and sampled tokens become actions.

One `Context` is one speaker's view of a conversation. It only ever grows, and every token in it says where it
came from (`Role`); the loss mask is derived from the roles and kept nowhere else. What the model sampled is
never decoded and encoded again: only new text is tokenised and appended.

Two tokenizers stand behind `Chat`: the model's own, and a twin without added tokens. Payload (what a user, a
tool or a file says) goes through the twin, so no text can become a control token; only the template's own
words, written in this file or in the model's chat template, are looked through for control tokens.

Deliberately not here: templates outside the ChatML family, images, and thinking mode. A template that
rewrites history (hybrid Qwen3 drops the think blocks of earlier turns) is followed for each new message and
not for old ones: the context stays append-only. That is the one difference from `apply_chat_template`, and
`Chat.check` looks past it.
"""

import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import jinja2
import jinja2.sandbox
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers


class UserError(Exception):
    """Something the person at the keyboard can put right: the message says what was wrong and what to do."""


class Role(IntEnum):
    """Where a token came from. Only AGENT tokens were chosen by the policy, and only they are trained."""

    SYSTEM = 0
    USER = 1
    TOOL = 2
    AGENT = 3
    TEMPLATE = 4


# ---------------------------------------------------------------- what an agent's turn means


@dataclass(frozen=True)
class Call:
    """A well-formed tool call. Whether the tool exists and likes its arguments is the world's business."""

    name: str
    arguments: dict


@dataclass(frozen=True)
class Say:
    """A message to the user: no calls, thoughts removed, never empty."""

    text: str


@dataclass(frozen=True)
class Malformed:
    """Output that means nothing; `why` is told to the model."""

    why: str


@dataclass(frozen=True)
class ToolCalls:
    """The calls of one turn in order, each good or Malformed on its own, and the prose beside them."""

    calls: tuple[Call | Malformed, ...]
    text: str


MAX_DEPTH = 32  # nesting of a call's JSON; deeper values would break copies and logs later
_TAG = re.compile(r"</?think>|</?tool_call>")
_CALL_TAG = re.compile(r"</?tool_call>")
_CALL_KEYS = {"name", "arguments", "id", "type"}


def parse(text: str) -> Say | ToolCalls | Malformed:
    """What an agent's turn means. Total: every string has an answer, and nothing is raised.

    The rules, each of which has a test:
    - `<think>…</think>` is removed, whatever it holds; a call in it is not a call. A `</think>` without its
      opening (which may stand in the prompt) makes everything before it a thought. A `<think>` left open is
      Malformed.
    - Every `<tool_call>` is one item, in order, good or Malformed on its own. One left open is Malformed and
      ends where the next one opens. A `</tool_call>` without its opening is a Malformed item.
    - A call is one JSON object with `name` (a non-empty string) and `arguments`: an object, or a string that
      holds one (decoded once), or nothing (`""`, null, absent), which means no arguments. Of other keys only
      `id` and `type` are let through: `"parameters"` would otherwise be a call without arguments.
    - Strict JSON: no NaN or infinities, no number beyond a finite double or a signed 64-bit integer, no key
      twice, no nesting beyond MAX_DEPTH, no lone surrogates.
    - A turn with nothing visible in it is Malformed.
    """
    calls: list[Call | Malformed] = []
    prose: list[str] = []
    at = 0
    while tag := _TAG.search(text, at):
        prose.append(text[at : tag.start()])
        at = tag.end()
        if tag[0] == "<think>":
            if (closing := text.find("</think>", at)) < 0:
                return Malformed("<think> was not closed")
            at = closing + len("</think>")
        elif tag[0] == "</think>":
            calls, prose = [], []
        elif tag[0] == "</tool_call>":
            calls.append(Malformed("</tool_call> without <tool_call>"))
        else:
            call, at = _read_call(text, at)
            calls.append(call)
    visible = "".join([*prose, text[at:]]).strip()
    if calls:
        return ToolCalls(tuple(calls), visible)
    return Say(visible) if visible else Malformed("empty message")


def _read_call(text: str, start: int) -> tuple[Call | Malformed, int]:
    """The call whose body begins at `start`, and where reading goes on."""
    body = start + len(text[start:]) - len(text[start:].lstrip())
    try:  # JSON itself finds the body's end, so that a tag inside a string is not taken for the closing one
        value, at = _DECODER.raw_decode(text, body)
        call = _as_call(value)
    except (ValueError, RecursionError) as error:
        at, call = body, Malformed(f"the call is not valid JSON: {_short(error)}")
    tag = _CALL_TAG.search(text, at)
    if tag is None:
        return Malformed("<tool_call> was not closed"), len(text)
    if tag[0] == "<tool_call>":
        return Malformed("<tool_call> was not closed before the next one"), tag.start()
    if isinstance(call, Call) and text[at : tag.start()].strip():
        call = Malformed(f"text after the call's JSON: {text[at : tag.start()].strip()[:40]!r}")
    return call, tag.end()


def _as_call(value: object) -> Call | Malformed:
    if not isinstance(value, dict):
        return Malformed("a call must be a JSON object with name and arguments")
    if unknown := sorted(value.keys() - _CALL_KEYS):
        return Malformed(f"unknown key {unknown[0][:40]!r} in the call: it takes name and arguments")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        return Malformed("the call has no name")
    if isinstance(arguments, str):
        arguments = _DECODER.decode(arguments.strip()) if arguments.strip() else {}
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return Malformed("arguments must be a JSON object")
    if _depth(arguments) > MAX_DEPTH:
        return Malformed(f"arguments are nested deeper than {MAX_DEPTH}")
    json.dumps([name, arguments], ensure_ascii=False).encode()  # a lone surrogate raises here, a ValueError
    return Call(name, arguments)


def _depth(value: object) -> int:
    level, depth = [value], 0
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        level = [child for v in level for child in (v.values() if isinstance(v, dict) else v)]
    return depth


def _unique(pairs: list[tuple[str, object]]) -> dict:
    if len(value := dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return value


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError("an integer does not fit in 64 bits")
    return int(digits)


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError("a number is too large")
    return value


def _constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_integer, parse_float=_finite, parse_constant=_constant
)


def _short(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).split(": line")[0][:80]


def turn_text(calls: Iterable[Call], text: str = "") -> str:
    """An agent's turn as the template writes it: prose, then each call in its tags. `parse` undoes it."""
    bodies = [json.dumps({"name": c.name, "arguments": c.arguments}, ensure_ascii=False) for c in calls]
    return "\n".join([text] * bool(text) + [f"<tool_call>\n{body}\n</tool_call>" for body in bodies])


# ---------------------------------------------------------------- one speaker's view


class Context:
    """One speaker's view of a conversation: tokens, their roles, the log-probs of the sampled ones. Append
    only.

    `stream` is the key of this context's own sequence of uniforms, for instance (seed, step, task, member,
    speaker): equal keys give equal numbers, whoever else is sampled beside it. `open_turn` is the index where
    the turn now being sampled began, or None. `full`: the sampler ran out of room.
    """

    def __init__(self, stream: tuple[int, ...]):
        self.stream = stream
        self.ids: list[int] = []
        self.roles: list[int] = []
        self.logprobs: list[float] = []  # nan where nothing was sampled
        self.open_turn: int | None = None
        self.full = False
        self._random: np.random.Generator | None = None
        self._block: list[float] = []

    def extend(self, ids: Sequence[int], role: int | Sequence[int]) -> None:
        """Appends what was not sampled: `role` is one for all `ids`, or one for each."""
        self.ids.extend(ids)
        self.roles.extend([int(role)] * len(ids) if isinstance(role, int) else role)
        self.logprobs.extend([math.nan] * len(ids))

    def sampled(self, token: int, logprob: float) -> None:
        """Appends one token that the policy chose, with its log-prob at the sampling temperature (nats)."""
        if self.open_turn is None:
            self.open_turn = len(self.ids)
        self.ids.append(token)
        self.roles.append(int(Role.AGENT))
        self.logprobs.append(logprob)

    def uniform(self) -> float:
        """The next number in [0, 1) of this context's own stream."""
        if not self._block:
            if self._random is None:
                # A hash of the whole tuple: SeedSequence would give (1,) and (1, 0) the same stream.
                key = hashlib.blake2b(repr(tuple(map(int, self.stream))).encode(), digest_size=16).digest()
                self._random = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
            self._block = self._random.random(64).tolist()[::-1]
        return self._block.pop()


@dataclass(frozen=True)
class Sample:
    """What a conversation yields: please sample `speaker`'s ("agent" or "user") next turn into `ctx`.

    At most `max_new` tokens, the end token included.
    """

    speaker: str
    ctx: Context
    max_new: int


# ---------------------------------------------------------------- templates

CHATML_TEMPLATE = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
    {{- 'Tools, one JSON schema a line:\n' }}
    {%- for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}
    {{- 'Use one like this:\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {%- set arguments = call.arguments if call.arguments is string else call.arguments | tojson %}
            {{- '\n' if message.content or not loop.first }}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' + arguments + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""The template of models trained here. Byte for byte what `Chat` writes."""

_PLAIN_TOOLS = (  # for templates that know no tools: before and after the schemas
    "You can use these tools, one JSON schema a line:\n",
    'To use a tool, answer with its name and arguments only, like this:\n<tool_call>\n{"name": "lookup", '
    '"arguments": {"key": "value"}}\n</tool_call>\nThe result comes back in <tool_response> tags.',
)


def render(template: str, messages: list[dict], tools: list[dict] | None = None, prompt: bool = False) -> str:
    """`apply_chat_template(tokenize=False, enable_thinking=False)` without loading transformers.

    Raises UserError if the template refuses the messages.
    """
    try:
        compiled = _compiled(template)
        return compiled.render(messages=messages, tools=tools, add_generation_prompt=prompt, enable_thinking=False)
    except (jinja2.TemplateError, TypeError) as error:
        raise UserError(f"the chat template fails: {error}; check the model's chat_template") from None


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    # Sandboxed: a template is a file from outside. The settings and helpers are those every published
    # one expects.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = functools.partial(_tojson)  # jinja's own one escapes for HTML
    environment.globals["raise_exception"] = _raise_template_error
    return environment.from_string(template)


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, **kwargs) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **kwargs)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


# ---------------------------------------------------------------- messages to tokens

Segment = tuple[str, Role, bool]  # text, whose it is, and whether control tokens in it are meant (template text only)
_CALL_TOKENS = ("<tool_call>", "</tool_call>")


class Chat:
    """Writes a ChatML conversation token by token: `<|im_start|>role\\n … <|im_end|>\\n`, with tools as in
    Qwen3.

    `template` is the model's Jinja chat template, `end` the token that ends a turn, `more_ends` ids of
    further tokens on which sampling stops. Raises UserError if the tokenizer lacks ChatML's tokens or the
    template is of another kind.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, end: str = "<|im_end|>", more_ends: Iterable[int] = ()):
        self.tokenizer, self.template, self.end = tokenizer, template, end
        for token in ("<|im_start|>", end):
            if tokenizer.token_to_id(token) is None:
                raise UserError(f"the tokenizer has no token {token!r}; choose a model with a ChatML chat template")
        self._controls = {t.content: i for i, t in tokenizer.get_added_tokens_decoder().items()}
        for token in ("<|im_start|>", end):
            self._controls.setdefault(token, tokenizer.token_to_id(token))
        self._plain = _without_added_tokens(tokenizer, self._controls)
        self._any_control = _either(self._controls)
        self._call_control = _either(t for t in _CALL_TOKENS if t in self._controls)
        self.end_id = tokenizer.token_to_id(end)
        self.end_ids = frozenset([self.end_id, *more_ends])
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        self._cache: dict[object, tuple[list[int], list[int]]] = {}
        hello = [{"role": "user", "content": "Hi"}]
        self.native_tools = render(template, hello, [_CHECK_TOOL]) != render(template, hello)
        self._prompt = render(template, hello, prompt=True).removeprefix(render(template, hello))
        if not self._prompt.startswith("<|im_start|>assistant\n"):
            raise UserError(f"the chat template is not ChatML: it asks for an answer with {self._prompt[:40]!r}")

    # ------------------------------------------------------------ folders

    @classmethod
    def load(cls, folder: str | Path) -> "Chat":
        """From tokenizer.json, tokenizer_config.json or chat_template.jinja, and generation_config.json."""
        folder = Path(folder)
        try:
            tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{folder} has no tokenizer.json; give a folder that holds a whole model") from None
        except Exception as error:  # tokenizers raises a bare Exception for bad content
            raise UserError(f"{folder / 'tokenizer.json'} cannot be read: {error}; copy it again") from None
        config, generation = (
            _read_json(folder / "tokenizer_config.json"),
            _read_json(folder / "generation_config.json"),
        )
        template = config.get("chat_template") or CHATML_TEMPLATE
        if (folder / "chat_template.jinja").exists():
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        if isinstance(template, list):  # several named ones
            template = {t["name"]: t["template"] for t in template}.get("default", template[0]["template"])
        eos = config.get("eos_token")
        eos = eos.get("content") if isinstance(eos, dict) else eos
        ends = generation.get("eos_token_id")  # an int, a list, or absent; every source counts
        ends = list(ends) if isinstance(ends, list) else [] if ends is None else [ends]
        if eos is not None and tokenizer.token_to_id(eos) is not None:
            ends.append(tokenizer.token_to_id(eos))
        end = "<|im_end|>" if tokenizer.token_to_id("<|im_end|>") is not None or eos is None else eos
        return cls(tokenizer, template, end, ends)

    def save(self, folder: str | Path) -> None:
        """Writes what `load` and transformers' AutoTokenizer read."""
        folder = Path(folder)
        self.tokenizer.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": self.template,
            "eos_token": self.end,
            "pad_token": self.end,
            "clean_up_tokenization_spaces": False,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        ends = json.dumps({"eos_token_id": sorted(self.end_ids)})
        (folder / "generation_config.json").write_text(ends + "\n", encoding="utf-8")

    # ------------------------------------------------------------ text and ids

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, none of them a control token whatever the text holds."""
        return list(self._tokens(((text, Role.TEMPLATE, False),))[0])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens included; bytes that are no UTF-8 become U+FFFD."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _tokens(self, segments: tuple[Segment, ...], control: re.Pattern | None = None) -> tuple[list, list]:
        """Ids and roles of adjoining segments.

        Between two control tokens the text is tokenised in one piece, as it would be in a rendered
        conversation: `"}` and the template's line break after it may share a token, which then counts as the
        payload's.
        """
        key = (segments, control)
        if key in self._cache:
            return self._cache[key]
        ids: list[int] = []
        roles: list[int] = []
        run: list[tuple[str, Role]] = []
        for text, role, trusted in segments:
            at = 0
            for hit in (control or self._any_control).finditer(text) if trusted else ():
                run.append((text[at : hit.start()], role))
                self._flush(run, ids, roles)
                ids.append(self._controls[hit[0]])
                roles.append(int(role))
                at = hit.end()
            run.append((text[at:], role))
        self._flush(run, ids, roles)
        if len(self._cache) >= 8192:
            self._cache.clear()
        if sum(len(text) for text, _, _ in segments) <= 2000:
            self._cache[key] = ids, roles
        return ids, roles

    def _flush(self, run: list[tuple[str, Role]], ids: list[int], roles: list[int]) -> None:
        run[:], pieces = [], [(_sayable(text), role) for text, role in run if text]
        encoded = self._plain.encode("".join(text for text, _ in pieces), add_special_tokens=False)
        ids.extend(encoded.ids)
        if len({role for _, role in pieces}) == 1:
            roles.extend([int(pieces[0][1])] * len(encoded.ids))
            return
        owner = [int(role) for text, role in pieces for _ in text]  # of each character
        for start, stop in encoded.offsets:
            span = owner[start : max(stop, start + 1)] or [int(Role.TEMPLATE)]
            roles.append(next((r for r in span if r != Role.TEMPLATE), int(Role.TEMPLATE)))

    def _append(self, ctx: Context, *segments: Segment) -> None:
        ctx.extend(*self._tokens(segments))

    # ------------------------------------------------------------ a conversation

    def start(self, system: str | None, tools: list[dict] | None, stream: tuple[int, ...]) -> Context:
        """A new context holding what the template puts before the first message: system prompt and tool list.

        What stands between `<|im_start|>system` and `<|im_end|>` has role SYSTEM. A template that knows no
        tools gets them in the system prompt, in our words; one with a default system prompt uses it when
        `system` is None.
        """
        ctx = Context(tuple(stream))
        user = f"<|im_start|>user\n{_MARK}"
        messages, native = self._opening(self._guard(system), self._guard(tools))
        text = render(self.template, [*messages, {"role": "user", "content": _MARK}], native)
        text, found, _ = text.partition(user)
        if not found:
            raise UserError(f"the chat template is not ChatML: it does not write a user's message as {user[:17]!r}…")
        head, opened, rest = text.partition("<|im_start|>system\n")
        body, closed, tail = rest.rpartition(self.end)
        if not closed:
            head, opened, body, tail = "", "", "", text
        pieces = re.split(f"([{_GUARD[0]}-{_GUARD[1]}])", body)  # guarded tokens stand at the odd places
        self._append(
            ctx,
            (head + opened, Role.TEMPLATE, True),
            *((self._unguard(piece), Role.SYSTEM, i % 2 == 0) for i, piece in enumerate(pieces)),
            (closed + tail, Role.TEMPLATE, True),
        )
        return ctx

    def _opening(self, system: str | None, tools: list[dict] | None) -> tuple[list[dict], list[dict] | None]:
        """The messages before the first, and the tools, as this template wants them."""
        if tools and not self.native_tools:
            listed = "".join(_tojson(tool) + "\n" for tool in tools)
            system = (system + "\n\n" if system else "") + _PLAIN_TOOLS[0] + listed + _PLAIN_TOOLS[1]
            tools = None
        return [{"role": "system", "content": system}] * (system is not None), tools or None

    def _guard(self, value: object) -> object:
        """`value` with every control token in its strings replaced by a private-use character that stands for
        it.

        A template weaves prompt and tool list into words of its own, where control tokens are meant
        (`<tool_call>` in Qwen3's instructions): afterwards the two could not be told apart.
        """
        if isinstance(value, str):
            names = list(self._controls)
            return self._any_control.sub(lambda hit: chr(ord(_GUARD[0]) + names.index(hit[0])), value)
        if isinstance(value, dict):
            return {self._guard(k): self._guard(v) for k, v in value.items()}
        return [self._guard(v) for v in value] if isinstance(value, list | tuple) else value

    def _unguard(self, piece: str) -> str:
        guarded = len(piece) == 1 and _GUARD[0] <= piece <= _GUARD[1]
        names = list(self._controls)
        index = ord(piece) - ord(_GUARD[0]) if guarded else 0
        return names[index] if guarded and index < len(names) else piece

    def hear(self, ctx: Context, text: str) -> None:
        """The other side says `text` (role USER); ends with the generation prompt, ready to be sampled."""
        self.close(ctx)
        self._append(
            ctx,
            ("<|im_start|>user\n", Role.TEMPLATE, True),
            (text, Role.USER, False),
            (f"{self.end}\n{self._prompt}", Role.TEMPLATE, True),
        )
        ctx.open_turn = len(ctx.ids)

    def observe(self, ctx: Context, results: list[str]) -> None:
        """Tool results (role TOOL), in the order of the calls and in one block, and the generation prompt."""
        self.close(ctx)
        segments: list[Segment] = [("<|im_start|>user", Role.TEMPLATE, True)]
        for result in results:
            segments.append(("\n<tool_response>\n", Role.TEMPLATE, True))
            segments.append((result, Role.TOOL, False))
            segments.append(("\n</tool_response>", Role.TEMPLATE, True))
        self._append(ctx, *segments, (f"{self.end}\n{self._prompt}", Role.TEMPLATE, True))
        ctx.open_turn = len(ctx.ids)

    def prompt(self, ctx: Context) -> None:
        """Only the generation prompt, for a speaker who opens the conversation."""
        self.close(ctx)
        self._append(ctx, (self._prompt, Role.TEMPLATE, True))
        ctx.open_turn = len(ctx.ids)

    def speak(self, ctx: Context, text: str) -> None:
        """A demonstration of the open turn: `text` and the end token, role AGENT, log-prob nan.

        Of the control tokens only `<tool_call>` and `</tool_call>` are meant as such.
        """
        assert ctx.open_turn == len(ctx.ids), "speak follows hear, observe or prompt"
        ids, roles = self._tokens(((text, Role.AGENT, True),), self._call_control)
        ctx.extend([*ids, self.end_id], [*roles, int(Role.AGENT)])

    def said(self, ctx: Context) -> str:
        """The text of the turn just sampled, without its end token."""
        assert ctx.open_turn is not None, "no turn is open"
        turn = ctx.ids[ctx.open_turn :]
        return self.decode(turn[:-1] if turn and turn[-1] in self.end_ids else turn)

    def close(self, ctx: Context) -> None:
        """Ends the open turn, if there is one, as the template would.

        A sampled end token keeps its role AGENT. A turn cut short, or one ended by another stop token than
        the template's, gets the template's end as TEMPLATE, which is never trained.
        """
        if ctx.open_turn is None:
            return
        whole = len(ctx.ids) > ctx.open_turn and ctx.ids[-1] == self.end_id
        self._append(ctx, ("\n" if whole else f"{self.end}\n", Role.TEMPLATE, True))
        ctx.open_turn = None

    # ------------------------------------------------------------ does this model's template agree?

    def check(self, tools: list[dict] | None, system: str | None = "Be brief.") -> None:
        """Compares a fixed conversation, message by message, with the model's own template.

        Compared as text, and without empty think blocks (see the file's head). Raises UserError with the
        place.
        """
        calls = [Call("look", {"key": "a é"}), Call("look", {"n": [1, 2.5, True, None]})]
        shown = turn_text(calls, "Let me look.")
        asked = {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [_as_message(c) for c in calls],
        }
        answered = [{"role": "tool", "content": r} for r in ('{"found": 1}', "Error: none")]
        if not self.native_tools:  # such a template would drop calls and misname results
            asked = {"role": "assistant", "content": shown}
            blocks = (f"<tool_response>\n{m['content']}\n</tool_response>" for m in answered)
            answered = [{"role": "user", "content": "\n".join(blocks)}]
        ctx = self.start(system, tools, (0,))
        messages, native = self._opening(system, tools)
        self.hear(ctx, "Hello, who has #7?")
        messages.append({"role": "user", "content": "Hello, who has #7?"})
        self._compare(ctx, messages, native, "a user's message")
        self.speak(ctx, shown)
        self.observe(ctx, ['{"found": 1}', "Error: none"])
        messages += [asked, *answered]
        self._compare(ctx, messages, native, "two calls and their results")
        self.speak(ctx, "Ann has it.")
        self.hear(ctx, "Thanks.")
        messages += [{"role": "assistant", "content": "Ann has it."}, {"role": "user", "content": "Thanks."}]
        self._compare(ctx, messages, native, "an answer and the next message")

    def _compare(self, ctx: Context, messages: list[dict], tools: list[dict] | None, after: str) -> None:
        ours, theirs = self.decode(ctx.ids), render(self.template, messages, tools, prompt=True)
        ours, theirs = (text.replace("<think>\n\n</think>\n\n", "") for text in (ours, theirs))
        if ours != theirs:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
            at = max(0, (min(len(ours), len(theirs)) if at is None else at) - 20)
            raise UserError(
                f"after {after} the chat template says {theirs[at : at + 60]!r} where this program writes "
                f"{ours[at : at + 60]!r}; choose a model whose template is ChatML with Hermes tools"
            )


_MARK = "\ufdd0"  # a code point that Unicode reserves for a program's own use
_GUARD = "\U000f0000", "\U000ffffd"  # private use: one character for each control token
_CHECK_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}


def _without_added_tokens(tokenizer: Tokenizer, controls: Iterable[str]) -> Tokenizer:
    """The same tokenizer, to which the control tokens are ordinary text."""
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"], spec["post_processor"] = [], None
    spec["truncation"] = spec["padding"] = None
    vocab = spec["model"].get("vocab")
    if isinstance(vocab, dict):  # a trained tokenizer lists them here too, where no merge can make them
        merged = {"".join(m) if isinstance(m, list) else m.replace(" ", "") for m in spec["model"].get("merges", [])}
        unk = spec["model"].get("unk_token")
        drop = {c for c in controls if c in vocab and c not in merged and c != unk and len(c) > 1}
        spec["model"]["vocab"] = {token: i for token, i in vocab.items() if token not in drop}
    return Tokenizer.from_str(json.dumps(spec))


def _either(tokens: Iterable[str]) -> re.Pattern:
    """Matches any of `tokens`, the longest first; nothing if there are none."""
    return re.compile("|".join(re.escape(t) for t in sorted(tokens, key=len, reverse=True)) or r"(?!)")


def _sayable(text: str) -> str:
    """`text`, with what UTF-8 cannot hold (lone surrogates) replaced by `?`."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _as_message(call: Call) -> dict:
    return {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}; copy it again") from None


# ---------------------------------------------------------------- a tokenizer for models trained from scratch

CONTROLS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# What text is cut into before anything is counted. A small model must *copy* names, numbers and items between speech and
# JSON, so a detail has to be the same tokens wherever it stands: a word takes the space behind it, never the one before;
# a full stop stays apart; an order number is a letter and a number, two alphabets that can't be mixed up. JSON's scaffolding
# (a call's head, the glue between fields) is one piece each, since there is nothing in it to decide.
PIECES = (
    r'\n?\{"name": "[a-z_]+", "arguments": \{(?:"[a-z_]+": ")?'
    r'|[\[\]{}",: ]*"[a-z_]+": [\[{"]*|[\]}"]+(?:, ")?\n?'
    r"|(?:system|user|assistant)\n|[A-Z][a-z]+(?: [a-z]+)?: |#[A-Z](?=\d)|\$?\d+|#+[A-Z]+#+"
    r"| ?[A-Za-z_']+ ?|[.,:?!] ?|\s|."
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE tokenizer, trained on `texts`, in which every piece (see PIECES) seen twice is one token.

    BPE reaches a long piece through many intermediate tokens that no text ever ends up with. They are dropped after
    training, and `ignore_merges` looks whole pieces up: a piece that was never seen falls back to bytes, so any text can
    be written and read back.
    """
    texts = list(texts)
    pre = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    grown = Tokenizer(models.BPE())
    grown.pre_tokenizer = pre
    trainer = trainers.BpeTrainer(vocab_size=16384, min_frequency=2, show_progress=False, initial_alphabet=alphabet)
    grown.train_from_iterator(texts, trainer)
    used = {token for line in grown.encode_batch(texts) for token in line.tokens}
    words = [*CONTROLS, *sorted(alphabet), *sorted(used - set(alphabet))]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(c, special=True, normalized=False) for c in CONTROLS])
    return tokenizer
