"""A Hugging Face tokenizer and its chat template, read from a model directory without `transformers`.

Templates are rendered as `transformers` renders them: a sandboxed Jinja with trimmed blocks, loop controls,
`tojson` that keeps unicode, `raise_exception` and `strftime_now`.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.resources
import importlib.util
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray
from tokenizers import Tokenizer

from paceline.errors import ConfigError, EnvError
from paceline.tokens.messages import ChatMessage, Tools

_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTokenizer:
    """Text and messages to ids and back. Stateless once loaded; safe to use from several threads."""

    __slots__ = (
        "_calls_as_text",
        "_special_ids",
        "_specials",
        "_stop",
        "_template",
        "_tokenizer",
        "name",
        "template_source",
        "vocab_size",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        *,
        stop_ids: Iterable[int] = (),
        special_tokens: dict[str, str] | None = None,
        name: str = "tokenizer",
    ) -> None:
        """`stop_ids` end a model call; `special_tokens` (`bos_token`, …) are what the template may print.

        ConfigError when the template is not valid Jinja.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.name = name
        self.template_source = template
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset([id_ for id_, token in added.items() if token.special])
        self._stop = tuple(sorted(set(stop_ids)))
        self._specials = dict(special_tokens or {})
        self._calls_as_text = False  # whether the template wants the arguments of calls as JSON text
        try:
            self._template = _environment().from_string(template)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template of {name} is not valid Jinja: {error}") from error

    @classmethod
    def load(cls, directory: Path | str, chat_template: Path | str | None = None) -> ChatTokenizer:
        """Read `tokenizer.json` and what stands beside it.

        `chat_template` is the path of a template to use instead of the model's own. ConfigError says which file
        is missing or unusable, and what to do.
        """
        root = Path(directory)
        path = root / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{root} has no tokenizer.json: save a fast tokenizer there, for example with "
                f"`AutoTokenizer.from_pretrained(...).save_pretrained({str(root)!r})`"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from error
        config = _read_json(root / "tokenizer_config.json")
        specials = _special_tokens(config, _read_json(root / "special_tokens_map.json"))
        template = _template_source(root, config, chat_template)
        stop = set(_ids(_read_json(root / "generation_config.json").get("eos_token_id")))
        model = _read_json(root / "config.json")
        stop.update(_ids(model.get("eos_token_id")))
        stop.update(_ids((model.get("text_config") or {}).get("eos_token_id")))
        eos = specials.get("eos_token")
        if eos is not None and (eos_id := tokenizer.token_to_id(eos)) is not None:
            stop.add(eos_id)
        if not stop:
            raise ConfigError(
                f"{root} names no end token: set eos_token in tokenizer_config.json or eos_token_id in "
                "generation_config.json, else no answer ever ends by itself"
            )
        return cls(tokenizer, template, stop_ids=stop, special_tokens=specials, name=str(directory))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a model call, ascending."""
        return self._stop

    @property
    def fingerprint(self) -> str:
        """Changes when ids or renderings may: of the vocabulary, the merges and the template."""
        digest = hashlib.blake2b(self._tokenizer.to_str().encode(), digest_size=8)
        digest.update(self.template_source.encode())
        return digest.hexdigest()

    def encode(self, text: str) -> NDArray[np.int32]:
        """Ids of exactly this text: nothing is added in front or behind; special tokens in it are recognised."""
        ids = np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        ids.flags.writeable = False
        return ids

    def encode_with_places(
        self, text: str, places: Sequence[tuple[int, int]]
    ) -> tuple[NDArray[np.int32], list[tuple[int, int]]]:
        """Ids as `encode` makes them, and for each (start, end) in characters the tokens that lie wholly within, as
        (first, end)."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        ids.flags.writeable = False
        return ids, [_within(encoding, start, end) for start, end in places]

    def decode(self, ids: Sequence[int] | NDArray[np.int32], *, keep_special: bool = False) -> str:
        """Text of the ids. A character of which only some bytes are there becomes U+FFFD; ids are not touched."""
        listed = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        text: str = self._tokenizer.decode(listed, skip_special_tokens=not keep_special)
        return text

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves it out unless special tokens are kept."""
        return token_id in self._special_ids

    def token(self, token_id: int) -> str:
        """Text of one token as it stands in the vocabulary; empty for an id outside it."""
        return self._tokenizer.id_to_token(token_id) or ""

    def id_of(self, token: str) -> int | None:
        """Id of a token by its text in the vocabulary."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def render(
        self, messages: Sequence[ChatMessage], tools: Tools | None = None, *, generate: bool = True
    ) -> str:
        """The conversation as text, with the header of an assistant message at the end if `generate`.

        Arguments of tool calls may be objects: a template that wants them as text is given text. EnvError when the
        template refuses the messages.
        """
        try:
            try:
                return self._rendered(messages, tools, generate)
            except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError):
                if self._calls_as_text or not any(message.get("tool_calls") for message in messages):
                    raise
            text = self._rendered(_calls_as_text(messages), tools, generate)
            self._calls_as_text = True
            return text
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages[-4:])
            raise EnvError(
                f"the chat template of {self.name} refuses messages (last roles: {roles}): {error}"
            ) from error

    def _rendered(self, messages: Sequence[ChatMessage], tools: Tools | None, generate: bool) -> str:
        return self._template.render(
            messages=_calls_as_text(messages) if self._calls_as_text else messages,
            tools=tools or None,
            add_generation_prompt=generate,
            **self._specials,
        )

    def literals(self) -> tuple[str, ...]:
        """Markup the template mentions: an answer that contains one may be rendered differently from others."""
        parsed = _environment().parse(self.template_source)
        found = {node.value for node in parsed.find_all(nodes.Const) if isinstance(node.value, str)}
        return tuple(sorted(text for text in (f.strip() for f in found) if _is_markup(text)))


def resolve_model_dir(name: str) -> Path:
    """The directory of a model: a directory, `pkg:PACKAGE/PATH` inside an installed package, or a hub id.

    A hub id is fetched if it is not here yet. ConfigError when there is none, with what to do.
    """
    if name.startswith("pkg:"):
        return _package_dir(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return path.absolute()  # engines and trainers that are told of it may have been started elsewhere
    if path.exists():
        raise ConfigError(f"model.name = {name!r} is a file: name the directory that holds config.json")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ConfigError(
            f"model.name = {name!r}: no such directory (seen from {Path.cwd()}); give a directory in Hugging "
            "Face form, pkg:PACKAGE/PATH, or a hub id of the form owner/model"
        )
    return _hub_dir(name)


def _package_dir(name: str) -> Path:
    package, _, inside = name.removeprefix("pkg:").partition("/")
    try:
        root = importlib.resources.files(package)
    except (ImportError, TypeError, ValueError) as error:
        raise ConfigError(f"model.name = {name!r}: package {package!r} is not installed") from error
    path = Path(str(root)) / inside
    if not path.is_dir():
        raise ConfigError(f"model.name = {name!r}: package {package!r} has no directory {inside!r}")
    return path


def _hub_dir(name: str) -> Path:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError(
            f"model.name = {name!r} is no directory here; to fetch it from the hub, `pip install "
            "huggingface_hub`, or give the path of a local copy"
        )
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # network, authorisation, no such repository: all for the user to mend
        raise ConfigError(
            f"model.name = {name!r} is no directory here and could not be fetched from the hub "
            f"({type(error).__name__}: {error}); give the path of a local copy"
        ) from error


def _within(encoding: Any, start: int, end: int) -> tuple[int, int]:
    """The tokens that lie wholly within characters [start, end), as (first, end)."""
    if start >= end:
        return 0, 0
    first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
    if first is None or last is None:
        return 0, 0  # a normaliser has removed the character
    # A character of several tokens is found by its first; and a token may reach over an edge.
    count = len(encoding.ids)
    while last + 1 < count and encoding.token_to_chars(last + 1) == encoding.token_to_chars(last):
        last += 1
    if encoding.token_to_chars(first)[0] < start:
        first += 1
    if encoding.token_to_chars(last)[1] > end:
        last -= 1
    return first, last + 1


def _calls_as_text(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages with the arguments of tool calls as JSON text."""
    return [
        {**message, "tool_calls": [_call_as_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _call_as_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("arguments", ""), str):
        return call
    return {**call, "function": {**function, "arguments": _to_json(function["arguments"])}}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} holds a {type(loaded).__name__}; expected a JSON object")
    return loaded


def _special_tokens(*configs: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for config in configs:
        for name in _SPECIALS:
            value = config.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found.setdefault(name, text)
    return found


def _template_source(root: Path, config: dict[str, Any], override: Path | str | None) -> str:
    if override is not None:
        path = Path(override).expanduser()
        if not path.is_file():
            raise ConfigError(f"model.chat_template = {str(override)!r}: no such file")
        return path.read_text(encoding="utf-8")
    path = root / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones: transformers takes `default`
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise ConfigError(
            f"{root} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): "
            "set model.chat_template to the path of one"
        )
    return template


def _ids(value: Any) -> list[int]:
    listed = value if isinstance(value, list) else [value]
    return [item for item in listed if isinstance(item, int)]


def _is_markup(text: str) -> bool:
    return len(text) >= 3 and any(mark in text for mark in "<[|◁{")


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}`: marks what the model says; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now()
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes <, > and & for HTML, which would change what the model reads.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now() -> Callable[[str], str]:
    # The date is taken once, when the template is loaded: were it to change at midnight, the prompts of one
    # rollout would no longer extend each other.
    at = datetime.datetime.now()
    return at.strftime
