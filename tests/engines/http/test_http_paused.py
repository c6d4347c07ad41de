"""Servers that a killed run has left paused, and what its next life does about them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fake_server import FakeServer, Say
from test_http_generate import engine_on

from paceline.cli.paused import FileMarks, Mark, resume_paused
from paceline.config import RunConfig
from paceline.config.load import load

CONFIG = """
run.name = "t"
run.dir = "{root}"
[model]
name = "pkg:paceline/assets/small_policy"
[[env]]
id = "reverse-text"
[batch]
rollouts = 16
seq_len = 512
[engine]
type = "vllm"
urls = ["{url}"]
"""


def a_run(root: Path, url: str) -> tuple[RunConfig, Path]:
    run_dir = root / "t"
    run_dir.mkdir()
    (run_dir / "status.json").write_text("{}")
    path = root / "run.toml"
    path.write_text(CONFIG.format(root=root, url=url))
    return load(RunConfig, [path]).value, run_dir


async def test_a_server_is_marked_from_the_pause_until_it_works_again(tmp_path: Path) -> None:
    marks, let_go = FileMarks(tmp_path), asyncio.Event()
    async with FakeServer() as fake, engine_on(fake, marks=marks) as engine:
        fake.say("/update_weights", Say(until=let_go))
        update = asyncio.ensure_future(engine.update_weights(3, "/weights/v3"))
        while not fake.paths("/update_weights"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert marks.all() == [Mark(fake.url, 3)]
        let_go.set()
        await update
        assert marks.all() == []


async def test_the_next_life_resumes_a_server_that_was_left_paused_and_gives_it_weights_anew(
    tmp_path: Path,
) -> None:
    async with FakeServer() as fake:
        config, run_dir = a_run(tmp_path, fake.url)
        marks = FileMarks(run_dir)
        marks.paused(fake.url, 3)
        fake.paused, fake.label = True, "v2"
        said: list[str] = []
        await resume_paused(config, str(run_dir), said.append)
        assert not fake.paused
        assert fake.paths("/finish_weight_update", "/resume") == ["/finish_weight_update", "/resume"]
        assert said == [f"engine at {fake.url}: was left paused by this run, and works again"]
        assert marks.has(fake.url), "what it holds is not known until it has been given weights"
        async with engine_on(fake, marks=marks) as engine:
            await engine.update_weights(2, "/weights/v2")
        assert not marks.has(fake.url)


async def test_a_server_that_somebody_else_has_updated_since_is_left_as_it_is(tmp_path: Path) -> None:
    async with FakeServer() as fake:
        config, run_dir = a_run(tmp_path, fake.url)
        FileMarks(run_dir).paused(fake.url, 3)
        fake.paused, fake.label = True, "v7"
        said: list[str] = []
        await resume_paused(config, str(run_dir), said.append)
        assert fake.paused
        assert "holds v7, newer than this run gave it" in said[0]


async def test_a_server_that_nothing_says_this_run_has_paused_is_left_alone(tmp_path: Path) -> None:
    async with FakeServer() as fake:
        config, run_dir = a_run(tmp_path, fake.url)
        fake.paused = True
        await resume_paused(config, str(run_dir), print)
        assert fake.paused
        assert not fake.calls


async def test_a_server_that_is_gone_is_told_of_and_keeps_nothing_from_going_on(tmp_path: Path) -> None:
    config, run_dir = a_run(tmp_path, "http://127.0.0.1:9")
    FileMarks(run_dir).paused("http://127.0.0.1:9", 3)
    said: list[str] = []
    await resume_paused(config, str(run_dir), said.append)
    assert "was left paused: " in said[0]
    assert "cannot connect" in said[0]
