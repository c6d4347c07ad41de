"""Tools: plain functions with type hints, described to the model by JSON schema, called with what it says.

    def divide(a: float, b: Annotated[float, "Not zero."]) -> float:
        "Divide a by b."
        return a / b

The hints make the schema that the chat template prints, and check the arguments that come back. Parameters named
`state` or `ctx` are filled in by the environment and not shown to the model. A plain function runs in a thread, so it
may block; an async one runs on the loop, so it may not.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Protocol, get_args, get_origin, get_type_hints

import msgspec

from paceline.envs.protocol import Context, InfrastructureError
from paceline.envs.text import cut_text
from paceline.errors import EnvError, said_by

INJECTED: Final = ("state", "ctx")
_MISSING = inspect.Parameter.empty


class ToolCall(msgspec.Struct, frozen=True):
    """One call that the model made."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


class BadCall(msgspec.Struct, frozen=True):
    """Something that was meant as a call and cannot be carried out: told to the model as an observation."""

    problem: str
    id: str = ""
    name: str = "tool"


class CallFormat(Protocol):
    """How calls stand in what the model says."""

    @property
    def in_template(self) -> bool:
        """Whether the tool list is printed by the chat template."""
        ...

    def calls(self, text: str) -> list[ToolCall | BadCall]:
        """The calls in an answer, in order; none makes it the final answer."""
        ...


class TaggedCalls:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write it; any number of them."""

    in_template = True

    def __init__(self, opening: str = "<tool_call>", closing: str = "</tool_call>") -> None:
        self._opening, self._closing = opening, closing
        self._pattern = re.compile(
            re.escape(opening) + r"(.*?)(?:" + re.escape(closing) + r"|\Z|(?=" + re.escape(opening) + "))",
            re.DOTALL,
        )

    def written(self, name: str, arguments: str) -> str:
        """A call as it stands in an answer; `arguments` is JSON, or what was meant to be."""
        # In JSON this character stands in strings alone; as it is, it could begin or end a call.
        said = (arguments.strip() or "{}").replace("<", "\\u003c")
        return f'{self._opening}{{"name": {json.dumps(name)}, "arguments": {said}}}{self._closing}'

    def calls(self, text: str) -> list[ToolCall | BadCall]:
        if self._opening not in text:
            return []
        return [_call_of(found) for found in self._pattern.findall(text)]


class PlainCalls:
    """Every answer is the one argument of the one tool, as far as `pattern` matches it; else it is the final answer.

    For small models that write no JSON.
    """

    in_template = False

    def __init__(self, tool: str, argument: str, pattern: str = r".*") -> None:
        self._tool, self._argument = tool, argument
        self._pattern = re.compile(pattern, re.DOTALL)

    def calls(self, text: str) -> list[ToolCall | BadCall]:
        said = text.strip()
        if not self._pattern.fullmatch(said):
            return []
        return [ToolCall(self._tool, {self._argument: said})]


def _call_of(text: str) -> ToolCall | BadCall:
    try:
        said = msgspec.json.decode(text.strip().encode())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        return BadCall(f"the call is not JSON: {error}")
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return BadCall('a call is a JSON object with "name" and "arguments"')
    arguments = said.get("arguments", said.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as JSON in a string
        try:
            arguments = msgspec.json.decode(arguments.encode())
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            return BadCall(f"the arguments are not JSON: {error}", name=said["name"])
    if not isinstance(arguments, dict):
        return BadCall('"arguments" must be a JSON object', name=said["name"])
    return ToolCall(said["name"], arguments, str(said.get("id") or ""))


class Tool:
    """A function that the model may call. EnvError when its hints make no schema."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        described, arguments = _documentation(inspect.getdoc(function) or "")
        try:
            hints = get_type_hints(function, include_extras=True)
            signature = inspect.signature(function)
        except (NameError, TypeError, ValueError) as error:
            raise EnvError(f"tool {self.name!r}: its type hints cannot be read: {error}") from error
        fields: list[Any] = []
        self.injected = tuple(name for name in signature.parameters if name in INJECTED)
        for name, parameter in signature.parameters.items():
            if name in INJECTED:
                continue
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise EnvError(
                    f"tool {self.name!r}: parameter {name!r} must be one that can be given by name"
                )
            if name not in hints:
                raise EnvError(
                    f"tool {self.name!r}: parameter {name!r} lacks a type hint: write {name}: int, say"
                )
            hint = _with_description(hints[name], arguments.get(name, ""))
            fields.append((name, hint) if parameter.default is _MISSING else (name, hint, parameter.default))
        try:
            self._arguments = msgspec.defstruct(
                "Arguments", fields, kw_only=True, forbid_unknown_fields=True, frozen=True
            )
            parameters = _inlined(msgspec.json.schema(self._arguments))
        except TypeError as error:
            raise EnvError(f"tool {self.name!r}: its parameters make no JSON schema: {error}") from error
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {"name": self.name, "description": described, "parameters": parameters},
        }

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, converted to their hints. ValueError says what does not fit."""
        try:
            made = msgspec.convert(dict(given), self._arguments, strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error
        return {name: getattr(made, name) for name in self._arguments.__struct_fields__}

    async def call(self, given: Mapping[str, Any], state: Any, ctx: Context) -> Any:
        """Carry it out: in a thread unless it is async. Raises whatever it raises."""
        arguments = self.arguments(given)
        for name in self.injected:
            arguments[name] = state if name == "state" else ctx
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**arguments)
        result = await ctx.in_thread(lambda: self.function(**arguments))
        return await result if inspect.isawaitable(result) else result


class ToolBox:
    """The tools of an environment."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        tools = [Tool(function) for function in functions]
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            names = [tool.name for tool in tools]
            twice = next(name for name in names if names.count(name) > 1)
            raise EnvError(f"two tools are called {twice!r}: rename one")
        self.schemas = [tool.schema for tool in tools]

    def __len__(self) -> int:
        return len(self._tools)

    async def observe(
        self, call: ToolCall | BadCall, state: Any, ctx: Context, *, within_s: float, most_chars: int
    ) -> tuple[str, bool]:
        """What the model is told of a call, and whether it went well. InfrastructureError alone is raised."""
        if isinstance(call, BadCall):
            return f"error: {call.problem}", False
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name!r}; there are {', '.join(self._tools)}", False
        try:
            async with asyncio.timeout(within_s) as limit:
                value = await tool.call(call.arguments, state, ctx)
            return cut_text(_said(value), most_chars, "middle"), True
        except InfrastructureError:
            raise
        except TimeoutError as error:
            if limit.expired():
                return f"error: no answer within {within_s:g} s", False
            return f"error: {said_by(error)}", False
        except Exception as error:  # whatever a tool does: the model may do better with its words
            text = str(error) if isinstance(error, ValueError) and error.__cause__ is not None else ""
            return cut_text(
                f"error: {text or f'{type(error).__name__}: {error}'}", most_chars, "middle"
            ), False


def numbered(calls: Sequence[ToolCall | BadCall]) -> list[ToolCall | BadCall]:
    """The same with ids that are all there and all different: each result must find its call."""
    seen: set[str] = set()
    done: list[ToolCall | BadCall] = []
    for n, call in enumerate(calls):
        name = call.id or f"call_{n}"
        while name in seen:
            name = f"{name}_{n}"
        seen.add(name)
        done.append(msgspec.structs.replace(call, id=name))
    return done


def _said(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value, enc_hook=str).decode()
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _with_description(hint: Any, described: str) -> Any:
    """`Annotated[int, "words"]`, and words of the docstring, in the form that makes it into the schema."""
    if get_origin(hint) is Annotated:
        base, *extras = get_args(hint)
        words = next((extra for extra in extras if isinstance(extra, str)), described)
        kept = [extra for extra in extras if isinstance(extra, msgspec.Meta)]
        return Annotated[(base, *kept, msgspec.Meta(description=words))] if words else hint
    return Annotated[hint, msgspec.Meta(description=described)] if described else hint


_ARGUMENT: Final = re.compile(r"^\s*(\w+)(?:\s*\([^)]*\))?:\s*(.+)$")
_ARGUMENTS: Final = re.compile(r"\n\s*(?:Args|Arguments|Parameters):\s*\n")


def _documentation(doc: str) -> tuple[str, dict[str, str]]:
    """The words before `Args:`, and those on each argument."""
    words, *rest = _ARGUMENTS.split(doc, maxsplit=1)
    arguments: dict[str, str] = {}
    for line in rest[0].splitlines() if rest else ():
        if not line.strip():
            break
        if (found := _ARGUMENT.match(line)) is not None:
            arguments[found[1]] = found[2].strip()
    return words.strip(), arguments


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without references, as chat templates print it."""
    definitions = schema.get("$defs", {})

    def resolve(part: Any, inside: tuple[str, ...] = ()) -> Any:
        if isinstance(part, dict):
            if "$ref" in part:
                name = part["$ref"].rpartition("/")[2]
                if name in inside:
                    return {}
                rest = {k: v for k, v in part.items() if k != "$ref"}
                return {**resolve(definitions[name], (*inside, name)), **resolve(rest, inside)}
            return {k: resolve(v, inside) for k, v in part.items() if k not in ("title", "$defs")}
        if isinstance(part, list):
            return [resolve(item, inside) for item in part]
        return part

    made: dict[str, Any] = resolve(schema)
    made.pop("additionalProperties", None)
    return made
