"""Questions and answers from a file, JSONL or Parquet, as data sets on the Hugging Face hub come, with a scorer.

[[env]]
id = "data"
args = { path = "gsm8k/train.parquet", prompt = "question", answer = "answer", scorer = "last_number" }
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from paceline.domain.task import Split
from paceline.envs.adapters import needed
from paceline.envs.plain import called
from paceline.envs.protocol import ListTasks, Says, SingleTurnEnv
from paceline.errors import ConfigError

Scorer = Callable[[str, Any, Mapping[str, Any]], Any]
"""Of what the model said, the row's answer, and the row: a number, a `Result`, or an awaitable of one."""

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_FIELD = re.compile(r"\{(\w+)\}")


class PromptAnswerData(SingleTurnEnv):
    """One row is one task."""

    def __init__(
        self,
        path: str,
        prompt: str = "prompt",
        answer: str = "answer",
        scorer: str = "exact",
        system_prompt: str | None = None,
        held_out: float = 0.1,
        eval_path: str | None = None,
        limit: int | None = None,
        blocking: bool | None = None,
    ) -> None:
        """`prompt` names a column (a text, or a list of chat messages), or is a template: `"Q: {question}"`.

        `scorer`: `exact`, `contains`, `last_number`, or `module:function`, called with (text, answer, row); `blocking`
        says where it runs, as it does of any environment. `held_out`: share of rows that only evals see, by a hash of the row, unless `eval_path` is
        a file of its own. `limit` takes the first rows alone. ConfigError for what is not there.
        """
        self.system_prompt = system_prompt
        self.blocking = blocking  # type: ignore[misc]
        self._prompt, self._answer = prompt, answer
        self._is_template = bool(_FIELD.search(prompt))
        self._scorer = _scorer(scorer)
        rows = read_rows(path)[:limit]
        self._check(path, rows)
        if eval_path is not None:
            self._rows = {"train": rows, "eval": read_rows(eval_path)}
            self._check(eval_path, self._rows["eval"])
        else:
            if not 0 <= held_out < 1:
                raise ConfigError(
                    f"held_out is {held_out}; it is a share of the rows, at least 0 and below 1"
                )
            kept = [row for row in rows if _place(row) >= held_out]
            self._rows = {"train": kept, "eval": [row for row in rows if _place(row) < held_out]}

    def tasks(self, split: Split) -> ListTasks:
        return ListTasks(self._rows[split])

    def prompt(self, data: Any) -> Says:
        if self._is_template:
            return _FIELD.sub(lambda found: str(data[found[1]]), self._prompt)
        said: Says = data[self._prompt]
        return said

    async def score(self, data: Any, text: str) -> Any:
        return await called(self, self._scorer, text, data.get(self._answer), data)

    def _check(self, path: str, rows: list[dict[str, Any]]) -> None:
        columns = [*(_FIELD.findall(self._prompt) if self._is_template else [self._prompt]), self._answer]
        for number, row in enumerate(rows):
            missing = [column for column in columns if column not in row]
            if missing:
                raise ConfigError(
                    f"{path}: row {number + 1} has no {missing[0]!r}, its columns are {', '.join(row)}: set "
                    "args.prompt and args.answer to the columns that hold them"
                )


def read_rows(path: str) -> list[dict[str, Any]]:
    """All rows of a `.jsonl`, `.json` (a list) or `.parquet` file. ConfigError names file and line."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(
            f"no file {path!r} (from {Path.cwd()}): args.path names a .jsonl, .json or .parquet file"
        )
    if file.suffix == ".parquet":
        table = needed("pyarrow.parquet", "parquet").read_table(file)
        rows: list[dict[str, Any]] = table.to_pylist()
        return rows
    text = file.read_bytes()
    if file.suffix == ".json":
        try:
            return msgspec.json.decode(text, type=list[dict[str, Any]])
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}: {error}; expected a list of objects") from error
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                rows.append(msgspec.json.decode(line, type=dict[str, Any]))
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}:{number}: {error}; expected one JSON object a line") from error
    return rows


def exact(text: str, answer: Any, row: Mapping[str, Any]) -> float:
    """1 when the answer is all that was said."""
    return float(text.strip() == str(answer).strip())


def contains(text: str, answer: Any, row: Mapping[str, Any]) -> float:
    """1 when the answer stands in what was said."""
    return float(str(answer).strip() in text)


def last_number(text: str, answer: Any, row: Mapping[str, Any]) -> float:
    """1 when the last number of what was said is the last one of the answer (`#### 42` and the like)."""
    said, right = _last(text), _last(str(answer))
    return float(said is not None and said == right)


_BUILT_IN: Mapping[str, Scorer] = {"exact": exact, "contains": contains, "last_number": last_number}


def _scorer(name: str) -> Scorer:
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    module, colon, function = name.partition(":")
    if not colon:
        raise ConfigError(
            f"scorer {name!r} is none of {', '.join(_BUILT_IN)}, and not of the form module:function"
        )
    try:
        found: Scorer = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"scorer {name!r} cannot be imported: {error}") from error
    return found


def _last(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def _place(row: Mapping[str, Any]) -> float:
    """Where a row lies in [0, 1): the same in every file that holds it, and in every order."""
    digest = hashlib.blake2b(msgspec.json.encode(row, enc_hook=str, order="sorted"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
