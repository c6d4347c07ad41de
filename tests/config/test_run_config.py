"""What a run's sections have to agree on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.config import RunConfig
from paceline.config.load import load
from paceline.errors import ConfigError

ENV = {"id": "reverse-text", "group_size": 4}


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"name": "policy"}, "env": [ENV], **sections})


def test_the_least_config_agrees_with_itself() -> None:
    assert config().batch.data_parallel == 1


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"batch": {"data_parallel": 2}}, "data_parallel is 2, but the reference trainer is one rank"),
        ({"batch": {"rollouts": 3}}, "group_size 4 > batch.rollouts 3"),
        ({"batch": {"seq_len": 64}, "sampling": {"max_tokens": 64}}, "may sample 64 tokens a turn"),
        ({"env": [ENV, ENV]}, "two env sections are both called 'reverse-text'"),
        ({"env": [ENV | {"name": "all"}]}, "'all' is reserved"),
        (
            {"engine": {"type": "vllm", "urls": ["http://e"]}, "sampling": {"top_p": 0.9}},
            "samples with top_p 0.9",
        ),
        ({"sampling": {"top_p": 0.9}}, "the reference trainer computes them of all of it"),
        ({"sampling": {"top_k": 20}}, "top_k 20, and its logprobs are of what"),
    ],
)
def test_sections_that_contradict_each_other_are_refused(sections: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        config(**sections)


@pytest.mark.parametrize(
    "name", ["", "../../x", "a/b", "..", ".hidden", "-x", "a b", "a\n", "a\x1b[2J", "x" * 61]
)
def test_a_run_is_named_by_one_word_that_stays_in_its_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="name"):
        config(run={"name": name})
    file = tmp_path / "run.toml"
    file.write_text('model.name = "m"\n[[env]]\nid = "a"\n[run]\nname = "../x"\n')
    with pytest.raises(
        ConfigError, match=r'toml:5: run.name = "../x": expected text, .* of letters, digits, `_`'
    ):
        load(RunConfig, [file])


def test_a_trainer_of_the_users_own_may_have_any_number_of_ranks() -> None:
    assert config(batch={"data_parallel": 2}, trainer={"type": "external"}).batch.data_parallel == 2
