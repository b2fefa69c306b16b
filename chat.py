"""Chat: messages become tokens, each with a role, and sampled tokens become actions.

One `Context` is one speaker's view of a conversation. It only ever grows, and every token in it says where it came from
(`Role`); the loss mask is derived from the roles and kept nowhere else. What the model sampled is never decoded and encoded
again: only new text is tokenised and appended.

Two tokenizers stand behind `Chat`: the model's own, and a twin without added tokens. Payload (what a user, a tool or a file
says) goes through the twin, so no text can become a control token; only the template's own words, written in this file or in
the model's chat template, are looked through for control tokens.

Deliberately not here: images, and thinking mode. A template that rewrites history (hybrid Qwen3 drops the think blocks of
earlier turns) is followed for each new message and not for old ones: the context stays append-only. That is the one
difference from `apply_chat_template`, and `Chat.check` looks past it.
"""

import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import jinja2
import jinja2.sandbox
import numpy as np
from tokenizers import Tokenizer


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


def parse(text: str, style: str = "hermes") -> Say | ToolCalls | Malformed:
    """What an agent's turn means. Total: every string has an answer, and nothing is raised.

    `style` is how the model writes calls: "hermes" in tags (Qwen and ourselves), "llama" bare. The rules, each of which
    has a test:
    - `<think>…</think>` is removed, whatever it holds; a call in it is not a call. A `</think>` without its opening (which
      may stand in the prompt) makes everything before it a thought. A `<think>` left open is Malformed.
    - Every `<tool_call>` is one item, in order, good or Malformed on its own. One left open is Malformed and ends where the
      next one opens. A `</tool_call>` without its opening is a Malformed item.
    - A call is one JSON object with `name` (a non-empty string) and `arguments`: an object, or a string that holds one
      (decoded once), or nothing (`""`, null, absent), which means no arguments. Of other keys only `id` and `type` are let
      through: `"parameters"` would otherwise be a call without arguments.
    - Strict JSON: no NaN or infinities, no number beyond a finite double or a signed 64-bit integer, no key twice, no
      nesting beyond MAX_DEPTH, no lone surrogates.
    - A turn with nothing visible in it is Malformed.
    - Llama: a turn that begins with `{` or `[{`, perhaps behind `<|python_tag|>`, is calls and nothing else: JSON objects
      in a row or a list, with `parameters` in place of `arguments`.
    """
    if style == "llama":
        return _parse_bare(text)
    calls, prose, at = [], [], 0
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


def _parse_bare(text: str) -> Say | ToolCalls | Malformed:
    """Calls are all that follows a thought; a tag inside a string of theirs is none. So where JSON fills the rest of the text
    after one of the tags, or the whole text, those are the calls; else what stands after the last tag counts."""
    ends = [0, *(tag.end() for tag in re.finditer("</think>", text))]
    bodies = [text[at:].strip().removeprefix("<|python_tag|>").strip() for at in ends]
    for body in bodies:
        calls, whole = _bare_calls(body)
        if whole:
            return ToolCalls(tuple(calls), "")
    if "<think>" in body:
        return Malformed("<think> was not closed")
    if calls:
        return ToolCalls(tuple(calls), "")
    return Say(body) if body else Malformed("empty message")


def _bare_calls(body: str) -> tuple[list[Call | Malformed], bool]:
    """The calls at the beginning of `body`, and whether it holds nothing else. [] where no JSON begins it."""
    calls, at = [], 0
    if not re.match(r"\{|\[\s*\{", body):
        return calls, False
    while at < len(body):
        try:
            value, at = _DECODER.raw_decode(body, at)
        except (ValueError, RecursionError) as error:
            return [*calls, Malformed(f"the call is not valid JSON: {_short(error)}")], False
        calls += [_as_call(v, "parameters") for v in (value if isinstance(value, list) else [value])]
        at += len(body[at:]) - len(body[at:].lstrip("; \n"))
    return calls, True


def _read_call(text: str, start: int) -> tuple[Call | Malformed, int]:
    """The call whose body begins at `start`, and where reading goes on."""
    body = start + len(text[start:]) - len(text[start:].lstrip())
    try:  # JSON itself finds the body's end, so that a tag inside a string is not taken for the closing one
        value, at = _DECODER.raw_decode(text, body)
        call = _as_call(value, "arguments")
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


def _as_call(value: object, key: str) -> Call | Malformed:
    """The call that a JSON value is; its arguments stand under `key`."""
    if not isinstance(value, dict):
        return Malformed(f"a call must be a JSON object with name and {key}")
    if unknown := sorted(value.keys() - {"name", key, "id", "type"}):
        return Malformed(f"unknown key {unknown[0][:40]!r} in the call: it takes name and {key}")
    name, arguments = value.get("name"), value.get(key)
    if not isinstance(name, str) or not name:
        return Malformed("the call has no name")
    try:
        if isinstance(arguments, str):
            arguments = _DECODER.decode(arguments.strip()) if arguments.strip() else {}
        json.dumps([name, arguments], ensure_ascii=False).encode()  # a lone surrogate raises here, a ValueError
    except (ValueError, RecursionError) as error:
        return Malformed(f"the call is not valid JSON: {_short(error)}")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return Malformed(f"{key} must be a JSON object")
    if _depth(arguments) > MAX_DEPTH:
        return Malformed(f"{key} are nested deeper than {MAX_DEPTH}")
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


def turn_text(calls: Iterable[Call], text: str = "", style: str = "hermes") -> str:
    """An agent's turn as the template writes it: prose, then each call in its tags. `parse` undoes it.

    In Llama's style a turn is either: prose beside calls is left out.
    """
    key = "parameters" if style == "llama" else "arguments"
    bodies = [json.dumps({"name": c.name, key: c.arguments}, ensure_ascii=False) for c in calls]
    if style == "llama":
        return "; ".join(bodies) or text
    return "\n".join([text] * bool(text) + [f"<tool_call>\n{body}\n</tool_call>" for body in bodies])


# ---------------------------------------------------------------- one speaker's view


class Context:
    """One speaker's view of a conversation: tokens, their roles, the log-probs of the sampled ones. Append only.

    `stream` is the key of this context's own sequence of uniforms, for instance (seed, step, task, member, speaker): equal
    keys give equal numbers, whoever else is sampled beside it. `open_turn` is the index where the turn now being sampled
    began, or None. `full`: the sampler ran out of room.
    """

    def __init__(self, stream: tuple[int, ...]):
        self.stream = stream
        self.ids: list[int] = []
        self.roles: list[int] = []
        self.logprobs: list[float] = []  # nan where nothing was sampled
        self.open_turn: int | None = None
        self.pending: tuple = ()  # text that is tokenised together with the first message
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
    """What a conversation yields: please sample `speaker`'s ("agent" or "user") next turn into `ctx`, of at most `max_new`
    tokens, the end token included."""

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


def render(template: str, messages: list[dict], tools=None, prompt: bool = False, special: dict | None = None) -> str:
    """`apply_chat_template(tokenize=False, enable_thinking=False)` without loading transformers.

    `special`: what the template may name, such as `bos_token`. Today's date is not among it (Llama 3.2 would write it into
    the prompt): a run must not depend on the day. Raises UserError if the template refuses the messages.
    """
    given = {"bos_token": "", "eos_token": ""} | (special or {}) | {"add_generation_prompt": prompt}
    try:
        return _compiled(template).render(messages=messages, tools=tools, enable_thinking=False, **given)
    except (jinja2.TemplateError, TypeError) as error:
        raise UserError(f"the chat template fails: {error}; check the model's chat_template") from None


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    # Sandboxed: a template is a file from outside. The settings and helpers are those every published one expects.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson  # jinja's own one escapes for HTML
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
    """Writes a conversation token by token, just as the model's own Jinja `template` would.

    Nothing about the format is written down here. What stands between two speakers' words is read off the template once,
    by rendering a conversation of marks: for ChatML that is `<|im_end|>\n<|im_start|>user\n … <|im_end|>\n`, for Llama 3
    `<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n …`. `end` is the control token that the template puts behind
    an answer; `more_ends` are ids of further ones on which sampling stops, as is the config's `eos_token`. `config`,
    `generation`: what stood in tokenizer_config.json and generation_config.json; it travels along. Raises UserError if the
    template can't be followed.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: str, more_ends: Iterable[int] = (), config: dict | None = None,
        generation: dict | None = None,
    ):  # fmt: skip
        self.tokenizer, self.template = tokenizer, template
        self.config, self.generation = config or {}, generation or {}
        self.special = {k: _content(v) for k, v in self.config.items() if k.endswith("_token") and _content(v)}
        self._controls = {t.content: i for i, t in tokenizer.get_added_tokens_decoder().items()}
        self._plain = _without_added_tokens(tokenizer, self._controls)
        self._any_control = _either(self._controls)
        self._call_control = _either(t for t in _CALL_TOKENS if t in self._controls)
        self._cache: dict[object, Any] = {}
        self._read_template()
        self.end_id = self._controls[self.end]
        ends = {self.end_id, self._controls.get(self.special.get("eos_token")), *more_ends}
        # Only a control token can end a turn: transformers writes its own default (2, for a Llama) where there was none.
        self.end_ids = frozenset(ends & set(self._controls.values()))
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1

    def _read_template(self) -> None:
        """How this template ends an answer, frames a message and a tool's result, and writes a call."""
        hello = {"role": "user", "content": "Hi"}
        answer = {"role": "assistant", "content": _MARK}
        self.native_tools = self._render([hello], [_CHECK_TOOL]) != self._render([hello])
        after = self._render([hello, answer, hello], prompt=True).partition(_MARK)[2].lstrip()
        if not (first := self._any_control.match(after)):
            raise UserError(f"the chat template does not end an answer with a control token but with {after[:40]!r}")
        self.end = first[0]
        self.style = "hermes"
        if self.native_tools:
            call = {"role": "assistant", "content": "", "tool_calls": [_as_message(Call(_MARK, {}))]}
            written = self._render([hello, call], [_CHECK_TOOL])
            self.style = "llama" if '"parameters"' in written and "<tool_call>" not in written else "hermes"
        self._user = self._frame([_message("user")])
        self._results = self._frame(self._result_messages([_MARK, _MARK]))  # before, between, after
        self._verbatim: set[Role] = set()
        probe = ' \n "\\é" \n'
        self._verbatim = {role for role in (Role.USER, Role.TOOL) if self._shown(probe, role) == probe}

    def _render(self, messages: list[dict], tools: list[dict] | None = None, prompt: bool = False) -> str:
        return render(self.template, messages, tools, prompt, self.special)

    def _written(self, messages: list[dict]) -> str:
        """What the template writes for `messages`: from behind the answer's end token to where the next answer begins."""
        answer = _message("assistant", _ANSWER)
        if messages[0]["role"] == "tool":
            answer = _message("assistant", "") | {"tool_calls": [_as_message(Call("f", {"x": _ANSWER}))]}
        text = self._render([_message("user", "Hi"), answer, *messages], prompt=True)
        return text.partition(_ANSWER)[2].partition(self.end)[2]

    def _frame(self, messages: list[dict]) -> list[str]:
        """What the template writes around the marks in `messages`."""
        pieces = self._written(messages).split(_MARK)
        if len(pieces) != 1 + sum(m["content"].count(_MARK) for m in messages):
            raise UserError(f"the chat template does not write the words of {messages[0]['role']!r} as they are given")
        return pieces

    def _result_messages(self, results: list[str]) -> list[dict]:
        """Tool results as messages: a template that knows no tools gets them as a user's words, in tags."""
        if self.native_tools:
            return [{"role": "tool", "name": "f", "content": r} for r in results]
        blocks = (f"<tool_response>\n{r}\n</tool_response>" for r in results)
        return [{"role": "user", "content": "\n".join(blocks)}]

    # ------------------------------------------------------------ text and ids

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, none of them a control token whatever the text holds."""
        return list(self._tokens(((text, Role.TEMPLATE, False),))[0])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens included; bytes that are no UTF-8 become U+FFFD."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _tokens(self, segments: tuple[Segment, ...], control: re.Pattern | None = None) -> tuple[list, list]:
        """Ids and roles of adjoining segments.

        Between two control tokens the text is tokenised in one piece, as it would be in a rendered conversation: `"}` and
        the template's line break after it may share a token, which then counts as the payload's.
        """
        key = (segments, control)
        if key in self._cache:
            return self._cache[key]
        ids, roles, run = [], [], []
        for text, role, trusted in segments:
            at = 0
            for hit in (control or self._any_control).finditer(text) if trusted else ():
                run.append((text[at : hit.start()], role))
                self._flush(run, ids, roles)
                ids.append(self._controls[hit[0]])
                roles.append(int(role if role == Role.AGENT else Role.TEMPLATE))
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

    # ------------------------------------------------------------ a conversation

    def start(self, system: str | None, tools: list[dict] | None, stream: tuple[int, ...]) -> Context:
        """A new context holding what the template puts before the first message: system prompt and tool list.

        A template that knows no tools gets them in the system prompt, in our words; one with a default system prompt
        uses it when `system` is None. What follows the last control token (Llama 3 puts the tools into the first
        user's turn) waits in `ctx.pending`, to be tokenised together with the message.
        """
        ctx = Context(tuple(stream))
        key = (system, json.dumps(tools))
        if key not in self._cache:
            messages, native = self._opening(self._guard(system), self._guard(tools))
            text, found, _ = self._render([*messages, _message("user")], native).partition(_MARK)
            if not found:
                raise UserError("the chat template does not write a user's first message as it is given")
            cut = max((hit.end() for hit in self._any_control.finditer(text)), default=0)
            opening = tuple(self._segments(text[:cut], Role.SYSTEM))
            self._cache[key] = self._tokens(opening), tuple(self._segments(text[cut:], Role.TEMPLATE))
        opening, ctx.pending = self._cache[key]
        ctx.extend(*opening)
        return ctx

    def _opening(self, system: str | None, tools: list[dict] | None) -> tuple[list[dict], list[dict] | None]:
        """The messages before the first, and the tools, as this template wants them."""
        if tools and not self.native_tools:
            listed = "".join(_tojson(tool) + "\n" for tool in tools)
            system = (system + "\n\n" if system else "") + _PLAIN_TOOLS[0] + listed + _PLAIN_TOOLS[1]
            tools = None
        return [{"role": "system", "content": system}] * (system is not None), tools or None

    def _guard(self, value: object) -> object:
        """`value` with every control token in its strings replaced by a private-use character that stands for it.

        A template weaves prompt and tool list into words of its own, where control tokens are meant (`<tool_call>` in
        Qwen3's instructions): afterwards the two could not be told apart.
        """
        if isinstance(value, str):
            names = list(self._controls)
            return self._any_control.sub(lambda hit: chr(ord(_GUARD[0]) + names.index(hit[0])), value)
        if isinstance(value, dict):
            return {self._guard(k): self._guard(v) for k, v in value.items()}
        return [self._guard(v) for v in value] if isinstance(value, list | tuple) else value

    def _segments(self, text: str, role: Role) -> list[Segment]:
        """Rendered text whose payload was guarded: template words, where control tokens are meant, and the guarded ones."""
        names, out = list(self._controls), []
        for i, piece in enumerate(re.split(f"([{_GUARD[0]}-{_GUARD[1]}])", text)):
            index = ord(piece) - ord(_GUARD[0]) if i % 2 else len(names)
            out.append((names[index] if index < len(names) else piece, role, i % 2 == 0))
        return out

    def _shown(self, text: str, role: Role) -> str:
        """`text` as the template writes it: most leave it alone; Llama 3 trims a message and quotes a tool's result."""
        if role in self._verbatim:
            return text
        safe = self._guard(text)
        messages = [_message("user", safe)] if role == Role.USER else self._result_messages([safe])
        around = self._user if role == Role.USER else self._results
        inner = self._written(messages).removeprefix(around[0]).removesuffix(around[-1])
        return "".join(piece for piece, _, _ in self._segments(inner, role))

    def hear(self, ctx: Context, text: str) -> None:
        """The other side says `text` (role USER); ends with the generation prompt, ready to be sampled."""
        self.close(ctx)
        before, after = self._user
        opened = ctx.pending or ((before, Role.TEMPLATE, True),)
        self._append(ctx, *opened, (self._shown(text, Role.USER), Role.USER, False), (after, Role.TEMPLATE, True))

    def observe(self, ctx: Context, results: list[str]) -> None:
        """Tool results (role TOOL), in the order of the calls and in one block, and the generation prompt."""
        self.close(ctx)
        before, between, after = self._results
        segments: list[Segment] = [(before, Role.TEMPLATE, True)]
        for i, result in enumerate(results):
            segments += [(between, Role.TEMPLATE, True)] * (i > 0)
            segments.append((self._shown(result, Role.TOOL), Role.TOOL, False))
        self._append(ctx, *segments, (after, Role.TEMPLATE, True))

    def _append(self, ctx: Context, *segments: Segment) -> None:
        ctx.extend(*self._tokens(segments))
        ctx.pending = ()
        ctx.open_turn = len(ctx.ids)

    def speak(self, ctx: Context, text: str) -> None:
        """A demonstration of the open turn: `text` and the end token, role AGENT, log-prob nan. Of the control tokens only
        `<tool_call>` and `</tool_call>` are meant as such."""
        assert ctx.open_turn == len(ctx.ids), "speak follows hear or observe"
        ids, roles = self._tokens(((text, Role.AGENT, True),), self._call_control)
        ctx.extend([*ids, self.end_id], [*roles, int(Role.AGENT)])

    def said(self, ctx: Context) -> str:
        """The text of the turn just sampled, without its end token."""
        assert ctx.open_turn is not None, "no turn is open"
        turn = ctx.ids[ctx.open_turn :]
        return self.decode(turn[:-1] if turn and turn[-1] in self.end_ids else turn)

    def close(self, ctx: Context) -> None:
        """Ends the open turn, if there is one, as the template would. A sampled end token keeps its role AGENT. A turn cut
        short, or one ended by another stop token than the template's, gets the template's end as TEMPLATE, never trained.
        """
        if ctx.open_turn is not None and ctx.ids[ctx.open_turn :][-1:] != [self.end_id]:
            ctx.extend([self.end_id], Role.TEMPLATE)
        ctx.open_turn = None

    def parse(self, text: str) -> Say | ToolCalls | Malformed:
        """What an agent's turn means, in the way this model writes calls."""
        return parse(text, self.style)

    # ------------------------------------------------------------ does this model's template agree?

    def check(self, tools: list[dict] | None, system: str | None = "Be brief.") -> None:
        """Compares a fixed conversation, message by message, with the model's own template: as text, and without empty think
        blocks (see the file's head). Raises UserError with the place."""
        calls = [Call("look", {"key": "a é"}), Call("look", {"n": [1, 2.5, True, None]})]
        calls, said = (calls[:1], "") if self.style == "llama" else (calls, "Let me look.")
        shown, results = turn_text(calls, said, self.style), ['{"found": 1}', "Error: none"][: len(calls)]
        asked = _message("assistant", said) | {"tool_calls": [_as_message(c) for c in calls]}
        if not self.native_tools:  # such a template would drop calls
            asked = _message("assistant", shown)
        ctx = self.start(system, tools, (0,))
        messages, native = self._opening(system, tools)
        self.hear(ctx, "Hello, who has #7?")
        messages.append(_message("user", "Hello, who has #7?"))
        self._compare(ctx, messages, native, "a user's message")
        self.speak(ctx, shown)
        self.observe(ctx, results)
        messages += [asked, *self._result_messages(results)]
        self._compare(ctx, messages, native, "calls and their results")
        self.speak(ctx, "Ann has it.")
        self.hear(ctx, "Thanks.")
        messages += [_message("assistant", "Ann has it."), _message("user", "Thanks.")]
        self._compare(ctx, messages, native, "an answer and the next message")

    def _compare(self, ctx: Context, messages: list[dict], tools: list[dict] | None, after: str) -> None:
        texts = self.decode(ctx.ids), self._render(messages, tools, prompt=True)
        ours, theirs = (text.replace("<think>\n\n</think>\n\n", "") for text in texts)
        if ours != theirs:
            differ = next(i for i in range(len(ours) + 1) if ours[: i + 1] != theirs[: i + 1])
            at = max(0, differ - 20)
            raise UserError(
                f"after {after} the chat template says {theirs[at : at + 60]!r} where this program writes "
                f"{ours[at : at + 60]!r}; choose a model whose template only ever appends"
            )


_MARK, _ANSWER = "\ufdd0", "\ufdd1"  # code points that Unicode reserves for a program's own use
_GUARD = "\U000f0000", "\U000ffffd"  # private use: one character for each control token
_CHECK_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}


def _message(role: str, content: str = _MARK) -> dict:
    return {"role": role, "content": content}


def _content(token: object) -> str | None:
    """A special token in tokenizer_config.json: a string, or an object with its `content`."""
    return token.get("content") if isinstance(token, dict) else token if isinstance(token, str) else None


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


def parse_json(text: str | bytes, **how) -> object:
    """json.loads of what stands in a file or an answer. Raises ValueError only: what is nested too deeply is broken, too."""
    try:
        return json.loads(text, **how)
    except RecursionError as error:
        raise ValueError(_short(error)) from None
