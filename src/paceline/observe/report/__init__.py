"""`report.html`: one file that opens offline and shows the whole run.

Nothing is fetched: style, script and data are inside. Model text is untrusted: the data is JSON in which no `<`
survives, the script puts strings into text nodes only, and the page's policy runs no other script than that one.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files

from paceline.observe.report.data import Extras, report_data
from paceline.observe.run import RunFolds

_SCRIPTS = ("base.js", "charts.js", "timeline.js", "page.js")


def render(folds: RunFolds, extras: Extras | None = None) -> str:
    """The page for what `folds` have read."""
    data = report_data(folds, extras or Extras())
    here = files(__name__)
    style = here.joinpath("style.css").read_text("utf-8")
    script = "\n".join(here.joinpath(name).read_text("utf-8") for name in _SCRIPTS)
    title = f"{data['facts']['name']} · Paceline report"
    parts = {
        "title": html.escape(title.encode("utf-8", "replace").decode()),
        "style": style,
        "style_hash": _hash(style),
        "script": script,
        "script_hash": _hash(script),
        "data": embedded_json(data),
    }
    page = here.joinpath("page.html").read_text("utf-8")
    # One pass over the template alone: what is put in is never looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)


def embedded_json(data: object) -> str:
    """JSON that is safe inside a script element: nothing in it can end the element or open a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Lone surrogates (a model may sample them) are no text: they cannot be written as UTF-8, and browsers choke.
    text = re.sub("[\ud800-\udfff]", "\ufffd", text)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


__all__ = ["Extras", "embedded_json", "render", "report_data"]
