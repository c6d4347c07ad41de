"""The words of the report are explained, so that a newcomer can read it."""

from __future__ import annotations

import json
import re

import pytest

from observe.told import Told
from paceline.observe.account import PLACES
from paceline.observe.report import render
from paceline.observe.report.terms import TERMS


def test_every_place_that_tokens_go_to_is_explained() -> None:
    assert {place.replace("_", " ") for place in PLACES} <= set(TERMS)


@pytest.mark.torch
def test_every_number_of_the_trainer_is_explained() -> None:
    pytest.importorskip("torch")
    from paceline.trainer.loss import Diagnostics

    told = {name.replace("_", " ") for name in (*Diagnostics().means(), "grad_norm", "lr")}
    assert told <= set(TERMS)


def test_every_title_of_a_chart_and_every_tile_is_explained() -> None:
    page = render(Told().folds)
    titles = set(re.findall(r'title: "([^"]+)"', page)) | set(re.findall(r'\btile\("([^"]+)"', page))
    titles |= set(re.findall(r'"([^"]+)", "sampled tokens, whole run"', page)) - {"Where every token went"}
    titles |= set(re.findall(r'\bterm\("([^"]+)"\)', page))
    assert len(titles) > 15
    assert {title.lower() for title in titles} - set(TERMS) == {"where every token went"} & titles
    [data] = re.findall(r'id="data">(.*?)</script>', page, re.S)
    assert json.loads(data)["terms"] == TERMS
