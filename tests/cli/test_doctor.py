"""`paceline doctor`: all that keeps a run from working, at once, with both sides of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.doctor import render
from paceline.cli.main import main
from paceline.runtime.doctor import Finding
from paceline.testing.tokens import CHATML, byte_tokenizer

TOOLED = """
from paceline.envs.protocol import ListTasks, SingleTurnEnv

class Tooled(SingleTurnEnv):
    tools = ("look",)

    def tasks(self, split):
        return ListTasks([{"say": "a"}])
"""


class _Server(BaseHTTPRequestHandler):
    """Answers by `server.facts`."""

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        facts = self.server.facts  # type: ignore[attr-defined]
        if self.path == "/v1/models":
            self._answer(200, {"data": [{"id": facts["model"], "max_model_len": facts["max_model_len"]}]})
        elif self.path == "/is_paused":
            self._answer(200, {"is_paused": False})
        elif self.path == "/metrics":
            self._answer(200, {})
        else:
            self._answer(404, {})

    def do_POST(self) -> None:
        facts = self.server.facts  # type: ignore[attr-defined]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            return self._answer(404, {})
        logprob = -0.7 if facts["raw"] else 0.0
        choice = {"text": "a", "finish_reason": "length", "logprobs": {"token_logprobs": [logprob]}}
        if facts["ids"]:
            choice["token_ids"] = [5] * body["max_tokens"]
        return self._answer(200, {"choices": [choice]})

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    """Healthy, but for what a test changes in `server.facts`."""
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    httpd.daemon_threads = True
    httpd.facts = {"model": "policy", "max_model_len": 4096, "ids": True, "raw": False}  # type: ignore[attr-defined]
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield httpd
    httpd.shutdown()
    httpd.server_close()
    thread.join()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory with everything but real weights."""
    directory = tmp_path / "model"
    directory.mkdir()
    byte_tokenizer()._tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML})
    )
    (directory / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "max_position_embeddings": 4096})
    )
    (directory / "model.safetensors").write_bytes(bytes(1000))
    return directory


def config(tmp_path: Path, model: Path, more: str = "", env: str = 'id = "reverse-text"') -> Path:
    file = tmp_path / "run.toml"
    file.write_text(
        f'[run]\ndir = "{tmp_path}/runs"\n[model]\nname = "{model}"\n[trainer]\ntype = "external"\n'
        f"[[env]]\n{env}\n{more}"
    )
    return file


def vllm(server: ThreadingHTTPServer) -> str:
    return f'[engine]\ntype = "vllm"\nurls = ["http://127.0.0.1:{server.server_address[1]}"]\n'


def doctor(*words: str | Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, str]]]:
    code = main(["doctor", "--json", *map(str, words)])
    return code, json.loads(capsys.readouterr().out)


def test_a_run_that_can_start_is_told_so(
    tmp_path: Path, model: Path, server: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config(tmp_path, model, vllm(server))
    code, found = doctor(file, capsys=capsys)
    assert code == 0, found
    assert {finding["level"] for finding in found} == {"ok"}
    assert main(["doctor", str(file)]) == 0
    told = capsys.readouterr().out.rstrip()
    assert told.endswith("this run can start")
    assert told.count(str(model)) == 1


def test_s77_everything_that_does_not_fit_is_told_at_once_with_both_sides(
    tmp_path: Path,
    model: Path,
    server: ThreadingHTTPServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "doctor_tooled.py").write_text(TOOLED)
    monkeypatch.syspath_prepend(str(tmp_path))
    server.facts |= {"model": "llama", "ids": False}  # type: ignore[attr-defined]
    more = vllm(server) + "[batch]\nseq_len = 8192\n"
    file = config(tmp_path, model, more, 'id = "doctor_tooled:Tooled"')
    began = time.monotonic()
    code, found = doctor(file, capsys=capsys)
    assert time.monotonic() - began < 5
    assert code == 2
    told = [finding for finding in found if finding["level"] == "error"]
    text = json.dumps(told)
    tools = next(finding for finding in told if "uses tools" in finding["what"])
    assert "Tooled.tools" in tools["facts"]
    assert "model.chat_template" in tools["remedy"]
    assert "batch.seq_len 8192 > the model's max_position_embeddings 4096" in text
    assert "max_model_len 4096" in text
    assert "return_token_ids" in text
    assert "serves no model 'policy' (it serves: llama)" in text
    sys.modules.pop("doctor_tooled", None)


def test_s24_a_template_that_rewrites_history_is_told_at_the_start_with_what_follows(
    tmp_path: Path, model: Path, server: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    strips = CHATML.replace("m.content", "(m.content if loop.last else m.content.split('</think>')[-1])")
    (model / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": strips})
    )
    file = config(tmp_path, model, vllm(server))
    _, found = doctor(file, capsys=capsys)
    (template,) = [finding for finding in found if finding["what"] == "chat template"]
    assert "not with thinking in an answer" in template["facts"]
    assert "goes on in a new sample with its whole prompt (more prefill, more samples" in template["facts"]
    counts = CHATML.replace("m.content", "loop.length ~ m.content")
    (model / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": counts})
    )
    assert main(["doctor", str(file)]) == 0  # a warning keeps nothing from starting
    assert "not append-only: each turn is rendered in full" in " ".join(capsys.readouterr().out.split())


def test_raw_logprobs_are_refused_where_the_temperature_is_not_one(
    tmp_path: Path, model: Path, server: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.facts["raw"] = True  # type: ignore[attr-defined]
    file = config(tmp_path, model, vllm(server))
    assert doctor(file, capsys=capsys)[0] == 0
    code, found = doctor(file, "--sampling.temperature", "0.6", capsys=capsys)
    assert code == 2
    assert "temperature 0.6" in found[0]["facts"]
    assert "--logprobs-mode processed_logprobs" in found[0]["remedy"]


def test_a_server_that_is_not_there_is_named_within_seconds(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config(tmp_path, model, '[engine]\ntype = "vllm"\nurls = ["http://127.0.0.1:1"]\n')
    began = time.monotonic()
    code, found = doctor(file, capsys=capsys)
    assert code == 2
    assert time.monotonic() - began < 5
    assert "http://127.0.0.1:1" in found[0]["what"]


@pytest.mark.parametrize(
    ("env", "more", "complaint"),
    [
        ('id = "reverse-txt"', "", "did you mean 'reverse-text'"),
        ('id = "no_such_module:Env"', "", "no module 'no_such_module'"),
        ('id = "reverse-text"\nargs = { nonsense = 1 }', "", "no argument 'nonsense'"),
        ('id = "reverse-text"', '[algorithm]\nname = "grop"\n', "did you mean 'grpo'"),
        ('id = "reverse-text"', '[services]\njudge = "no_such_module:ask"\n', "no_such_module:ask"),
        (
            'id = "reverse-text"',
            "[sampling]\nmax_tokens = 5000\n[batch]\nseq_len = 6000\n",
            "max_tokens 5000",
        ),
        ('id = "reverse-text"\n[env.limits]\nmax_context = 9000', "", "limits.max_context 9000"),
    ],
)
def test_each_part_of_a_config_is_looked_at(
    env: str, more: str, complaint: str, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = doctor(config(tmp_path, model, more, env), capsys=capsys)
    assert code == 2
    assert any(complaint in finding["facts"] for finding in found if finding["level"] == "error"), found


def test_a_model_that_is_not_there_or_has_no_template_is_named_with_the_remedy(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = doctor(config(tmp_path, tmp_path / "nowhere"), capsys=capsys)
    assert code == 2
    assert "nowhere" in found[0]["facts"]
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    code, found = doctor(config(tmp_path, model), capsys=capsys)
    assert code == 2
    assert "model.chat_template" in found[0]["facts"]


def test_a_port_that_is_taken_and_a_directory_that_is_none_are_named(
    tmp_path: Path, model: Path, server: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").write_text("a file")
    port = server.server_address[1]
    code, found = doctor(config(tmp_path, model, f"[metrics.prometheus]\nport = {port}\n"), capsys=capsys)
    assert code == 2
    errors = " ".join(finding["facts"] for finding in found if finding["level"] == "error")
    assert f"127.0.0.1:{port}" in errors
    assert "no directory" in errors


def test_a_metrics_endpoint_for_all_the_world_needs_a_token(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config(tmp_path, model, '[metrics.prometheus]\nhost = "0.0.0.0"\nport = 0\n')
    monkeypatch.delenv("PACELINE_METRICS_TOKEN", raising=False)
    _, found = doctor(file, capsys=capsys)
    assert "PACELINE_METRICS_TOKEN" in found[0]["facts"]
    monkeypatch.setenv("PACELINE_METRICS_TOKEN", "secret")
    _, found = doctor(file, capsys=capsys)
    assert [finding for finding in found if "endpoint" in finding["what"]] == []


ODD = """
from paceline.envs import ListTasks, SingleTurnEnv

class Odd(SingleTurnEnv):
    closed = 0

    def __init__(self, path: str = "") -> None:
        if path:
            open(path)

    def tasks(self, split):
        return ListTasks([object()] if split == "train" else [1])

    async def close(self):
        Odd.closed += 1
"""


def test_environments_are_tried_as_the_run_makes_them_and_closed_again(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_env.py").write_text(ODD)
    monkeypatch.syspath_prepend(tmp_path)
    _, found = doctor(config(tmp_path, model, env='id = "odd_env:Odd"'), capsys=capsys)
    told = " ".join(finding["facts"] for finding in found if finding["level"] == "error")
    assert "not JSON-like" in told
    assert "give ListTasks a fingerprint" in told
    env = 'id = "odd_env:Odd"\nargs = { path = "/no/such/file" }'
    _, found = doctor(config(tmp_path, model, env=env), capsys=capsys)
    told = " ".join(finding["facts"] for finding in found if finding["level"] == "error")
    assert "its constructor raised FileNotFoundError" in told
    assert sys.modules["odd_env"].Odd.closed == 1


RANKS = """
from paceline.envs import GroupEnv, ListTasks

class Ranks(GroupEnv):
    def tasks(self, split):
        return ListTasks(["a", "b"] if split == "train" else ["c"])
"""


@pytest.mark.parametrize(
    "workers", ["", 'workers = { type = "process", count = 1 }'], ids=["inline", "workers"]
)
def test_an_eval_that_scores_groups_of_another_size_is_told(
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    workers: str,
) -> None:
    (tmp_path / "ranks_env.py").write_text(RANKS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    env = f'id = "ranks_env:Ranks"\ngroup_size = 6\n{workers}'
    for k, wrong in ((1, True), (6, False)):
        held_out = f'[[eval]]\nid = "ranks_env:Ranks"\nexamples = 1\nk = {k}\n{workers}'
        _, found = doctor(config(tmp_path, model, held_out, env=env), capsys=capsys)
        told = [f for f in found if "groups of another size" in f["what"]]
        assert [f["remedy"].partition(",")[0] for f in told] == ["set k to 6"] * wrong


FAULTY = """
from paceline.envs import ListTasks, MultiTurnEnv, SingleTurnEnv

HALF = chr(0xD800)
ITSELF = {"w": "ab"}
ITSELF["self"] = ITSELF

class Faulty(SingleTurnEnv):
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def tasks(self, split):
        faulty = {"half task": HALF, "endless task": ITSELF}.get(self.fault, {"w": "cd"})
        return ListTasks([{"w": "ab"}, faulty])

    def prompt(self, data):
        if data == {"w": "ab"}:
            return "reverse: ab"
        match self.fault:
            case "none":
                return None
            case "half":
                return HALF
            case "exit":
                raise SystemExit("over")
        return "reverse: cd"

    def score(self, data, text):
        return 0.0

class Later(SingleTurnEnv):
    def tasks(self, split):
        return ListTasks([1])

    def prompt(self, data):
        async def later():
            return "reverse: ab"
        return later()

class Silent(MultiTurnEnv):
    def tasks(self, split):
        return ListTasks([1])

    def start(self, data, ctx):
        pass
"""


@pytest.mark.parametrize(
    ("env", "told"),
    [
        (
            'Faulty"\nargs.fault = "none"',
            "what prompt() returns for task 1 cannot be said to the model: EnvError: said None to the model; expected a text",
        ),
        ('Faulty"\nargs.fault = "half"', "what prompt() returns for task 1 cannot be said to the model: "),
        ('Faulty"\nargs.fault = "exit"', "task 1 has no first prompt: SystemExit: over (faulty_env.py:"),
        ('Faulty"\nargs.fault = "half task"', "not JSON-like (task 1: UnicodeEncodeError: "),
        ('Faulty"\nargs.fault = "endless task"', "not JSON-like (task 1: RecursionError: "),
        ('Silent"', "what start() returns for task 0 cannot be said to the model: TypeError: "),
    ],
)
def test_an_environment_that_cannot_say_anything_is_named_with_the_task_and_the_remedy(
    env: str,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "faulty_env.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    file = config(tmp_path, Path("pkg:paceline/assets/small_policy"), env=f'id = "faulty_env:{env}')
    code, found = doctor(file, "--engine.type=embedded", capsys=capsys)
    assert code == 2
    [error] = [finding for finding in found if finding["level"] == "error" and "faulty_env" in str(finding)]
    assert told in f"{error['what']}: {error['facts']}"
    assert f"env 'faulty_env:{env.partition(chr(34))[0]}'" in f"{error['what']}: {error['facts']}"
    assert error["remedy"] or "make them of texts" in error["facts"]


def test_a_prompt_that_the_run_will_await_is_left_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "later_env.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    file = config(tmp_path, Path("pkg:paceline/assets/small_policy"), env='id = "later_env:Later"')
    code, found = doctor(file, "--engine.type=embedded", capsys=capsys)
    assert code == 0, found


def test_modules_of_environments_are_imported_one_at_a_time(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that import modules which need each other can wait for each other, until Python ends one with an error."""
    (tmp_path / "at_once.py").write_text("now = most = 0\n")
    counts = (
        "import time, at_once\nat_once.now += 1\nat_once.most = max(at_once.most, at_once.now)\n"
        "time.sleep(0.1)\nat_once.now -= 1\n"
    )
    for name in ("left_env", "right_env"):
        (tmp_path / f"{name}.py").write_text(counts + ODD)
    monkeypatch.syspath_prepend(tmp_path)
    evals = "".join(f'[[eval]]\nid = "{name}:Odd"\nexamples = 1\n' for name in ("left_env", "right_env"))
    code, found = doctor(config(tmp_path, model, evals), capsys=capsys)
    assert code == 0, found
    assert sys.modules["at_once"].most == 1


def test_modules_of_ours_that_the_checks_use_are_imported_before_their_threads_start() -> None:
    program = (
        "import ast, asyncio, inspect, sys\n"
        "import paceline.config.load\n"
        "from paceline.cli import checks\n"
        "async def examine(_checks, limit_s):\n"
        "    parts = (checks.imports, checks.machine, checks.model, checks.servers)\n"
        "    nodes = [n for part in parts for n in ast.walk(ast.parse(inspect.getsource(part)))]\n"
        "    used = {n.module for n in nodes if isinstance(n, ast.ImportFrom)}\n"
        "    print(sorted(m for m in used if m.startswith('paceline.') and m not in sys.modules))\n"
        "    return []\n"
        "checks.examine, checks.checks_of = examine, lambda loaded, probe_s: {}\n"
        "asyncio.run(checks.diagnose(None))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_text_puts_what_is_wrong_first_and_the_remedy_below(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(config(tmp_path, model, '[algorithm]\nname = "grop"\n'))]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAIL  algorithm 'grop'")
    assert lines[-1] == "1 problem keeps this run from working"


def test_one_cause_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (tmp_path / "nowhere", tmp_path):  # no directory; one without a model
        file = config(tmp_path, place, '[[eval]]\nid = "no_such_module:E"\n', 'id = "no_such_module:E"')
        code, found = doctor(file, capsys=capsys)
        assert code == 2
        wrong = [finding for finding in found if finding["level"] == "error"]
        assert len(wrong) == 2, wrong
        assert sum("no_such_module" in finding["facts"] for finding in wrong) == 1
        named = next(finding for finding in wrong if "no_such_module" in finding["facts"])["what"]
        assert "env[0]" in named
        assert "eval[0]" in named


@pytest.mark.parametrize(("seq_len", "level"), [(20, "error"), (24, "warning")])
@pytest.mark.parametrize("env", ["reverse-text", "guess-number"])
def test_prompts_that_are_longer_than_a_sample_may_be_are_told_before_the_run(
    env: str, seq_len: int, level: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config(tmp_path, Path("pkg:paceline/assets/small_policy"), "", f'id = "{env}"')
    words = [f"--batch.seq-len={seq_len}", "--sampling.max-tokens=8", "--engine.type=embedded"]
    _code, found = doctor(file, *words, capsys=capsys)
    told = [finding for finding in found if "prompts are as long" in finding["what"]]
    if env == "guess-number" and level == "warning":  # its prompts are all alike, and shorter
        assert told == []
        return
    [finding] = told
    assert finding["level"] == level
    assert env in finding["what"]
    assert f"batch.seq_len is {seq_len}" in finding["facts"]
    assert "of the first 16 tasks have prompts of 22" in finding["facts"] or "24" in finding["facts"]


def test_a_finding_cannot_command_the_terminal() -> None:
    told = render([Finding("error", "a\x1b[2J", "b\rc\nd", "e\x07")])
    assert not set("\x1b\r\x07") & set(told)


def test_what_cannot_fit_into_memory_is_told_before_it_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[model]\nname = "pkg:paceline/assets/small_policy"\n[[env]]\nid = "reverse-text"\n')
    options = ["--run.dir", str(tmp_path), "--engine.replicas", "2"]
    assert main(["doctor", str(config), *options]) == 0
    told = " ".join(capsys.readouterr().out.split())
    # 4 layers of 2 x 2 x 32 numbers of 4 bytes: 2,048 a token, as `paceline capacity` has it.
    assert "2 x 0.07 GB for engine.kv_tokens = 32768" in told
    assert main(["doctor", str(config), *options, "--engine.kv_tokens", "1000000000000"]) == 2
    told = " ".join(capsys.readouterr().out.split())
    assert "the engines and the trainer do not fit into memory" in told
    assert "at least 4,096,000.0 GB needed: 2 x 2,048,000.00 GB for engine.kv_tokens = 1000000000000" in told
    assert "lower engine.kv_tokens" in told
