"""The reference, `--help` and the schema, made from the models."""

from __future__ import annotations

import subprocess
import sys

from paceline.config import RunConfig
from paceline.config.reference import groups, help_text, json_schema, markdown

from .sample_models import Config


def test_an_option_says_its_flag_type_bounds_default_and_meaning() -> None:
    text = help_text(Config)
    assert "--orchestrator.batch-size  integer, at least 1  [default 16]\n      Rollouts a step." in text
    assert '--orchestrator.on-stale  "drop" | "train"  [default "drop"]' in text
    assert "--env.N.id  text  [required]" in text
    assert "--per-site.NAME.max-turns" in text
    assert '--orchestrator.limits.max-turns  integer, at least 1, or "none"  [default 5]' in text


def test_every_member_of_a_union_is_a_group_and_the_default_one_is_marked() -> None:
    found = {group.header: group.meaning for group in groups(Config)}
    assert found['[admission] type = "fixed"'] == "How many run. A constant cap."
    assert found['[admission] type = "adaptive"'] == "How many run. Grow, trim, cut. The default."
    assert found["[tracker]"] == "Off unless there. A constant cap. Left out by default."


def test_colour_is_for_terminals_only() -> None:
    assert "\x1b[" in help_text(Config, color=True)
    assert "\x1b[" not in help_text(Config)


def test_the_markdown_reference_is_the_same_in_every_process() -> None:
    program = (
        "from paceline.config import RunConfig; from paceline.config.reference import markdown;"
        "import sys; sys.stdout.reconfigure(encoding='utf-8'); print(markdown(RunConfig), end='')"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=True
        ).stdout
        for _ in range(2)
    }
    assert printed == {markdown(RunConfig)}


def test_a_markdown_table_has_as_many_cells_in_each_row_as_columns() -> None:
    rows = [line for line in markdown(Config).splitlines() if line.startswith("| ")]
    assert {row.replace("\\|", "").count("|") for row in rows} == {5}


def test_every_option_of_the_run_config_is_documented() -> None:
    undocumented = [o.flag for group in groups(RunConfig) for o in group.options if not o.meaning]
    assert undocumented == []


def test_the_schema_has_no_null_since_toml_has_none() -> None:
    schema = json_schema(Config)
    ceiling = schema["$defs"]["Adaptive"]["properties"]["ceiling"]
    assert ceiling["anyOf"][1] == {"const": "none"}
    assert "null" not in str(schema)
    assert schema["properties"]["seed"]["description"] == "Seeds everything."
