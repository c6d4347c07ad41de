"""S-76: the resolved config, written and read back, is the same config."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.config import RunConfig
from paceline.config.dump import dump
from paceline.config.load import load

from .conftest import LoadText
from .sample_models import Adaptive, Config, Env, Fixed, Kind, Limits, Orchestrator

# The words that stand for none, and near them, come up often: that is where text is lost.
TEXT = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.sampled_from(["none", "None", '"none"', '""none""', "<none>", "<<none>>", '"none', "true", "0", ""]),
)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False, min_value=1e-300)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
COUNTS = st.integers(1, 2**63 - 1)
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), INTEGERS, st.floats(allow_nan=False), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
FIXED = st.builds(Fixed, cap=COUNTS, eval_share=FINITE)
ADAPTIVE = st.builds(Adaptive, floor=st.integers(1, 9), ceiling=st.none() | st.integers(9, 99))
LIMITS = st.builds(Limits, max_turns=st.none() | COUNTS, deadline_s=NUMBERS)
ENV = st.builds(
    Env,
    id=TEXT,
    weight=NUMBERS,
    stop=st.none() | st.lists(TEXT, max_size=2).map(tuple),
    args=st.dictionaries(TEXT, ANYTHING, max_size=3),
    limits=LIMITS,
    admission=st.none() | FIXED | ADAPTIVE,
)
CONFIGS = st.builds(
    Config,
    seed=INTEGERS,
    out=st.text(string.ascii_letters + "/ .", min_size=1, max_size=6).map(Path),
    kind=st.sampled_from(Kind),
    port=INTEGERS | TEXT,
    level=st.sampled_from([0, 1, "auto"]),
    buckets=st.lists(INTEGERS, max_size=3).map(tuple),
    betas=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    prompt_or_none=st.none() | TEXT,
    anything=ANYTHING,
    scores=st.dictionaries(TEXT, st.none() | INTEGERS, max_size=3),
    orchestrator=st.builds(
        Orchestrator,
        batch_size=st.integers(9, 2**63 - 1),
        on_stale=st.sampled_from(["drop", "train"]),
        shuffle=st.booleans(),
        system=st.none() | TEXT,
        limits=LIMITS,
    ),
    admission=FIXED | ADAPTIVE,
    per_site=st.dictionaries(TEXT, LIMITS, max_size=2),
    env=st.lists(ENV, max_size=3).map(tuple),
    tracker=st.none() | FIXED,
    size_bytes=INTEGERS,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(config=CONFIGS)
def test_s76_any_config_reads_back_equal_from_what_is_written_of_it(
    config: Config, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "resolved.toml"
    file.write_text(dump(config), encoding="utf-8", newline="")
    assert load(Config, [file]).value == config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (key, value)
        for key, values in {
            "seed": [0, 5],
            "buckets": [(), (0,), (1, 2)],
            "prompt_or_none": [None, "", "hello", "none"],
            "anything": [None, 0, False, [], {}, "", [None], {"a": None}],
            "scores": [{}, {"a": None}, {"a": 0}],
            "orchestrator": [Orchestrator(), Orchestrator(shuffle=False), Orchestrator(system="")],
            "admission": [Adaptive(), Adaptive(floor=4), Adaptive(ceiling=None), Fixed()],
            "env": [(), (Env(id=""),), (Env(id="a", stop=()), Env(id="b", stop=None, args={"x": False}))],
            "tracker": [None, Fixed(), Fixed(eval_share=0.0)],
        }.items()
        for value in values
    ],
)
def test_s76_none_empty_zero_false_and_default_read_back_as_they_are(
    load_text: LoadText, key: str, value: Any
) -> None:
    config = Config(**{key: value})
    again = load_text(dump(config)).value
    assert again == config
    assert type(getattr(again, key)) is type(value)


def test_s76_the_written_file_says_every_key_so_that_later_defaults_do_not_change_it(
    load_text: LoadText,
) -> None:
    loaded = load_text(dump(Config(env=(Env(id="a"),))))
    assert "default" not in loaded.provenance.values()


def test_s76_a_run_config_reads_back_equal_from_what_is_written_of_it(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[model]\nname = "m"\n[[env]]\nid = "arithmetic"\n[env.sampling]\ntemperature = 0.5\n')
    first = load(RunConfig, [file])
    file.write_text(dump(first.value, first.provenance))
    again = load(RunConfig, [file])
    assert again.value == first.value
    assert "default" not in again.provenance.values()


def test_the_written_file_says_where_each_value_came_from(load_text: LoadText) -> None:
    loaded = load_text('seed = 3\n[[env]]\nid = "a"\nargs = { x = 1 }\n', flags="--no-orchestrator.shuffle")
    lines = dump(loaded.value, loaded.provenance).splitlines()
    assert "seed = 3  # run.toml:1" in lines
    assert "x = 1  # run.toml:4" in lines
    assert "shuffle = false  # flag" in lines
    assert "batch_size = 16  # default" in lines
    assert 'tracker = "none"  # default' in lines
