"""`paceline capacity`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.main import main

EIGHT_B = ["--layers", "36", "--kv-heads", "8", "--head-dim", "128", "--weights-gb", "16"]


def test_it_prints_tokens_and_whole_rollouts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", *EIGHT_B, "--gpu", "H100", "--context", "8000", "32000"]) == 0
    out = capsys.readouterr().out
    assert "147,456" in out
    assert "47 whole rollouts" in out
    assert "11 whole rollouts (11.9)" in out


def test_json_has_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", *EIGHT_B, "--memory-gb", "80", "--context", "8000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes_per_token"] == 147_456
    assert found["kv_tokens"] == pytest.approx(380_000, rel=0.001)
    assert found["rollouts"]["8000"] == pytest.approx(47.5, rel=0.001)


def test_it_reads_a_model_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", "pkg:paceline/assets/small_policy", "--context", "512", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_token"] > 0


def test_it_reads_the_config_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        """
[model]
name = "pkg:paceline/assets/small_policy"
[batch]
seq_len = 500
[engine]
type = "embedded"
kv_tokens = 10_000
[[env]]
id = "reverse-text"
limits.max_context = 250
"""
    )
    assert main(["capacity", str(config), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kv_tokens"] == 10_000, "the engine's own cache, no GPU's"
    assert found["rollouts"] == {"250": 40.0, "500": 20.0}
    assert main(["capacity", str(config), "--gpu", "H100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory_gb"] == 80, "the same model on a GPU"
    assert main(["capacity", str(config)]) == 0
    assert "20 whole rollouts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "name a MODEL"),
        (["nowhere"], "models are not fetched"),
        ([*EIGHT_B, "--gpu", "H1000"], "unknown GPU 'H1000'"),
        ([*EIGHT_B, "--kv-dtype", "int3"], "dtype 'int3'"),
        ([*EIGHT_B, "--utilization", "9"], "--utilization"),
    ],
)
def test_what_is_missing_or_wrong_is_said(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["capacity", *words]) == 2
    assert text in capsys.readouterr().err
