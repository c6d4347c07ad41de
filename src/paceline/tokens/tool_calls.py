"""Tool calls and thinking, read from what a model said. The text is only looked at: the sampled ids stand.

Each family of models writes calls in its own markup. A format takes the text of an answer (special tokens kept) and
returns what is left of it as content, and the calls. Text that looks like a call and is none (JSON that does not
parse, no name) stays content: the environment, or the agent program, decides what to make of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from paceline.tokens.messages import Tools


class ToolCall(msgspec.Struct, frozen=True):
    """A function that the model wants called."""

    name: str
    arguments: str
    """A JSON object, as text."""


class Answer(msgspec.Struct, frozen=True):
    """An answer, taken apart."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    thinking: str = ""


Format: TypeAlias = Callable[[str, Tools], tuple[str, list[ToolCall]]]
"""(text, tools) → (what is not a call, the calls). The tools tell how to read arguments that are written untyped."""


def read_answer(text: str, format: str, tools: Tools | None, *, split_thinking: bool = False) -> Answer:
    """Take an answer apart: calls only if there are `tools`, thinking only if `split_thinking`.

    `text` has its special tokens, less the end token. KeyError if there is no such format.
    """
    thinking = ""
    if format == "harmony":
        thinking, text = _harmony_thinking(text)
        if not split_thinking:
            thinking = ""
    elif split_thinking:
        thinking, text = _split_thinking(text)
    calls: list[ToolCall] = []
    if tools and format != "none":
        text, calls = FORMATS[format](text, tools)
    return Answer(text, tuple(calls), thinking)


def detect_format(template: str) -> str:
    """The format of the family that a chat template belongs to; `none` when it prints no calls that we know."""
    for mark, format in _MARKS:
        if mark in template:
            return format
    return "none"


_MARKS: Final = (
    ("<arg_key>", "glm"),
    ("<function=", "qwen_xml"),
    ("<|tool_calls_section_begin|>", "kimi"),
    ("tool▁calls▁begin", "deepseek"),
    ("<|tool_call>call:", "gemma"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|channel|>", "harmony"),
    ("<|start_header_id|>ipython", "llama"),
)
"""What a template prints around calls, the more telling first."""


# ── JSON between tags: Hermes, Qwen 2.5 and 3 ──


def _hermes(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    # The last one may lack its closing tag, where the model took that for the end.
    return _take(re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL), text, lambda m: _named(m[1]))


# ── XML with untyped values: Qwen-Coder, Qwen 3.5, Nemotron ──

_PARAMETER = re.compile(r"<parameter=([^>]{1,200})>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)


def _qwen_xml(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    def call(match: re.Match[str]) -> list[ToolCall] | None:
        inner = re.match(r"\s*<function=([^>\s]+)>(.*?)(?:</function>\s*$|$)", match[1], re.DOTALL)
        if inner is None:
            return None
        return [_typed(inner[1], _PARAMETER.findall(inner[2]), tools)]

    return _take(re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL), text, call)


# ── keys and values in tags: GLM ──

_ARGUMENT = re.compile(r"<arg_key>([^<]{0,200})</arg_key>\s*+<arg_value>(.*?)</arg_value>", re.DOTALL)


def _glm(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    def call(match: re.Match[str]) -> list[ToolCall] | None:
        name = match[1].split("<arg_key>", 1)[0].strip()
        closed = match[1].rpartition(
            "</arg_value>"
        )  # behind the last of them there is no whole value to look for
        return [_typed(name, _ARGUMENT.findall(closed[0] + closed[1]), tools)] if name else None

    return _take(re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL), text, call)


# ── bare JSON: Llama 3 ──


PYTHON_TAG: Final = "<|python_tag|>"
"""What may stand in front of Llama's calls."""


def _llama(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    body = text.replace(PYTHON_TAG, "").strip()
    if not body.startswith("{"):
        return text, []
    calls = []
    for value in _json_values(body, between=";"):
        call = _call_of(value)
        if call is None:
            return text, []
        calls.append(call)
    return ("", calls) if calls else (text, [])


# ── after a marker: Mistral ──

_MISTRAL_NAMED = re.compile(r"\s*+([\w.\-]++)\s*+(?:\[CALL_ID\]\s*+[\w\-]*+\s*+)?(?:\[ARGS\])?\s*+(?=\{)")


def _mistral(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    content, *parts = text.split("[TOOL_CALLS]")
    calls: list[ToolCall] = []
    for part in parts:
        if part.lstrip().startswith("["):
            found = _named(part)
        elif (named := _MISTRAL_NAMED.match(part)) is not None:
            arguments = next(_json_values(part[named.end() :]), None)
            made = _made(named[1], arguments)
            found = None if made is None else [made]
        else:
            found = None
        if found is None:
            return text, []
        calls += found
    return (content.strip(), calls) if calls else (text, [])


# ── marked parts: DeepSeek, Kimi ──

_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(.{0,200}?)<｜tool▁sep｜>(.*?)(?:<｜tool▁call▁end｜>|$)", re.DOTALL
)
_DEEPSEEK_FRAME = re.compile(r"<｜tool▁calls▁(?:begin|end)｜>")
_FENCED = re.compile(r"(.{0,200}?)\n```json\n(.*?)\n```", re.DOTALL)


def _deepseek(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    def call(match: re.Match[str]) -> list[ToolCall] | None:
        fenced = _FENCED.match(match[2])  # V3 and R1: type, name, fenced JSON; V3.1 and later: name, JSON
        name, arguments = (fenced[1], fenced[2]) if fenced else (match[1], match[2])
        return _called(name.strip(), arguments)

    content, calls = _take(_DEEPSEEK, text, call)
    return (_DEEPSEEK_FRAME.sub("", content).strip(), calls) if calls else (text, [])


_KIMI = re.compile(
    r"<\|tool_call_begin\|>\s*(?:functions\.)?([\w.\-]+?)(?::\d+)?\s*"
    r"<\|tool_call_argument_begin\|>(.*?)(?:<\|tool_call_end\|>|$)",
    re.DOTALL,
)
_KIMI_FRAME = re.compile(r"<\|tool_calls_section_(?:begin|end)\|>")


def _kimi(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    content, calls = _take(_KIMI, text, lambda m: _called(m[1], m[2]))
    return (_KIMI_FRAME.sub("", content).strip(), calls) if calls else (text, [])


# ── keys without quotes, texts between marks: Gemma 4 ──

_GEMMA = re.compile(r"<\|tool_call>call:([\w.\-]+)(\{.*?)(?:<tool_call\|>|$)", re.DOTALL)
_GEMMA_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"][^{}\[\],:]*):")


def _gemma(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    def call(match: re.Match[str]) -> list[ToolCall] | None:
        between = match[2].split('<|"|>')
        between[::2] = [_GEMMA_KEY.sub(r'\1"\2":', part) for part in between[::2]]
        between[1::2] = [json.dumps(said) for said in between[1::2]]
        call = _made(match[1], _parsed("".join(between)))
        return None if call is None else [call]

    return _take(_GEMMA, text, call)


# ── channels: GPT-OSS ──

_HARMONY_CALL = re.compile(
    r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)? to=functions\.([\w.\-]{1,200}+)(?:<\|channel\|>\w+)?"
    r"[^<]{0,200}+(?:<\|constrain\|>\w+)?<\|message\|>(.*?)(?:<\|call\|>|<\|end\|>|$)",
    re.DOTALL,
)
_HARMONY_MARK = re.compile(r"<\|start\|>assistant|<\|channel\|>\w+|<\|message\|>|<\|end\|>|<\|return\|>")
_HARMONY_THOUGHT = re.compile(r"<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|>|$)", re.DOTALL)


def _harmony(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    content, calls = _take(_HARMONY_CALL, text, lambda m: _called(m[1], m[2]))
    return _HARMONY_MARK.sub("", content).strip(), calls


def _harmony_thinking(text: str) -> tuple[str, str]:
    thinking = "\n".join(found.strip() for found in _HARMONY_THOUGHT.findall(text))
    rest = _HARMONY_THOUGHT.sub("", text)
    return thinking, rest if " to=functions." in rest else _HARMONY_MARK.sub("", rest).strip()


THOUGHTS: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""What thinking stands between."""


def thought(text: str) -> tuple[int, str] | None:
    """Where the thinking that `text` begins with starts, and the tag that ends it; None where it has none, or not yet.

    What it says of a text it says of whatever goes on from it. The opening tag may stand in the prompt: then only the
    first closing one shows that it was thinking.
    """
    begun = text.lstrip()
    for opening, closing in THOUGHTS:
        if begun.startswith(opening):
            return len(text) - len(begun) + len(opening), closing
    ends = [(at, closing) for _, closing in THOUGHTS if (at := text.find(closing)) >= 0]
    return (0, min(ends)[1]) if ends else None


def _split_thinking(text: str) -> tuple[str, str]:
    """(thinking, the rest). Thinking that was cut has no closing tag."""
    found = thought(text)
    if found is None:
        return "", text
    start, closing = found
    thinking, _, rest = text[start:].partition(closing)
    return thinking.strip(), rest.lstrip("\n")


FORMATS: Final[Mapping[str, Format]] = {
    "hermes": _hermes,
    "qwen_xml": _qwen_xml,
    "glm": _glm,
    "llama": _llama,
    "mistral": _mistral,
    "deepseek": _deepseek,
    "kimi": _kimi,
    "gemma": _gemma,
    "harmony": _harmony,
}


BEGINNINGS: Final[Mapping[str, str]] = {
    "hermes": "<tool_call>",
    "qwen_xml": "<tool_call>",
    "glm": "<tool_call>",
    "llama": "{",
    "mistral": "[TOOL_CALLS]",
    "deepseek": "<｜tool▁call",
    "kimi": "<|tool_call",
    "gemma": "<|tool_call>",
}
"""What the first call of an answer begins with: text before it is content. Llama's has no text before it. In `harmony`,
whose channels come in any order, nothing is content before the end."""


# ── pieces ──
#
# Answers may be long and go round in circles, and they are read on the event loop. So each pattern looks at a character a few times
# only: names have an end (200 characters), and what repeats gives nothing back (`++`).


def _take(
    pattern: re.Pattern[str], text: str, read: Callable[[re.Match[str]], list[ToolCall] | None]
) -> tuple[str, list[ToolCall]]:
    """The text without what `pattern` finds and `read` can read, and the calls; what it cannot read stays."""
    calls: list[ToolCall] = []

    def replaced(match: re.Match[str]) -> str:
        found = read(match)
        if found is None:
            return match[0]
        calls.extend(found)
        return ""

    content = pattern.sub(replaced, text)
    return (content.strip(), calls) if calls else (text, [])


def _named(text: str) -> list[ToolCall] | None:
    """Calls written as `{"name": …, "arguments": …}`, or a list of those."""
    value = next(_json_values(text), None)
    listed = value if isinstance(value, list) else [value]
    calls = [call for one in listed if (call := _call_of(one)) is not None]
    return calls if calls and len(calls) == len(listed) else None


def _call_of(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        found = _called(value["name"], arguments)
        return found[0] if found else None
    return _made(value["name"], arguments)


def _made(name: str, arguments: Any) -> ToolCall | None:
    """None where the arguments are no object, or hold what JSON has no words for: NaN, infinities, half a surrogate pair."""
    if not isinstance(arguments, dict):
        return None
    try:
        said = _json(arguments)
        (name + said).encode()
    except (ValueError, RecursionError):
        return None
    return ToolCall(name, said)


def _called(name: str, arguments: str) -> list[ToolCall] | None:
    """A call whose arguments are JSON text; None if that is not an object."""
    value = next(_json_values(arguments), None) if arguments.strip() else {}
    call = _made(name, value) if name else None
    return None if call is None else [call]


def _typed(name: str, given: Sequence[tuple[str, str]], tools: Tools) -> ToolCall:
    """A call whose values are written without quotes: text where the tool's schema wants text, else JSON."""
    schema = _parameters(name, tools)
    arguments: dict[str, Any] = {}
    for key, text in given:
        wanted = schema.get(key.strip())
        kind = wanted.get("type") if isinstance(wanted, Mapping) else None
        value: Any = text
        if kind != "string":
            parsed = _parsed(text.strip())
            if parsed is not _NOT_JSON and _made(name, {key: parsed}) is not None:
                value = parsed
        arguments[key.strip()] = value
    return ToolCall(name, _json(arguments))


def _parameters(name: str, tools: Tools) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return properties if isinstance(properties, Mapping) else {}
    return {}


_NOT_JSON: Final = object()
_DECODER: Final = json.JSONDecoder()


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _NOT_JSON


def _json_values(text: str, between: str = "") -> Iterator[Any]:
    """The JSON values that `text` begins with, one after another; ends at the first that is none."""
    at = 0
    while at < len(text):
        while at < len(text) and (text[at].isspace() or text[at] in between):
            at += 1
        try:
            value, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        yield value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
