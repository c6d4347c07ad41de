from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.engines.embedded import EngineOptions
from paceline.engines.embedded import __main__ as process
from paceline.errors import ConfigError


def test_the_command_line_gives_back_the_options_it_was_made_from() -> None:
    options = EngineOptions(model="m", port=1, kv_tokens=64, max_model_len=60, dtype="bfloat16", seed=-3)
    assert EngineOptions(**vars(EngineOptions.parser().parse_args(options.arguments()))) == options


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gpu-node-7"])
def test_beyond_loopback_a_token_is_needed(host: str) -> None:
    with pytest.raises(ConfigError, match="set PACELINE_ENGINE_TOKEN"):
        EngineOptions(model="m", host=host)
    EngineOptions(model="m", host=host, token="secret")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_on_loopback_no_token_is_needed(host: str) -> None:
    EngineOptions(model="m", host=host)


@pytest.mark.parametrize(
    "wrong",
    [{"kv_tokens": 0}, {"block_size": -1}, {"max_num_seqs": 0}, {"max_model_len": 0}, {"dtype": "int8"}],
)
def test_a_value_that_cannot_work_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EngineOptions(model="m", **wrong)


def test_whoever_starts_an_engine_need_not_import_torch() -> None:
    check = "import sys, paceline.engines.embedded; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_the_token_may_come_from_a_file_and_is_never_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.engines.embedded import server

    served: list[EngineOptions] = []

    async def serve(options: EngineOptions) -> None:
        served.append(options)

    monkeypatch.setattr(server, "serve", serve)
    file = tmp_path / "token"
    file.write_text("hunter2\n")
    parser = EngineOptions.parser()
    process.add_arguments(parser)
    words = ["--model", "m", "--no-exit-with-parent", "--token-file"]
    assert process.run(parser.parse_args([*words, str(file)])) == 0
    assert served[0].token == "hunter2"
    assert "hunter2" not in served[0].arguments()
    file.write_text("\n")
    assert process.run(parser.parse_args([*words, str(file)])) == 2
    assert "is empty" in capsys.readouterr().err
    assert process.run(parser.parse_args([*words, str(tmp_path / "none")])) == 2
