"""The same workers as Ray actors, on a local cluster of several nodes. Skipped, and said so, without the ray extra."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_process_workers import told
from test_serving import gone, started
from worker_envs import Program
from worker_kit import HERE, TOKENIZER, Engine, Inside, inside

from paceline.config import GatewaySection, Limits
from paceline.domain.ids import RolloutId
from paceline.runtime.gateway import Gateway

ray = pytest.importorskip("ray", reason="needs the ray extra: pip install 'paceline[ray]'")

pytestmark = [
    pytest.mark.ray,
    # Ray's own sockets and pipes are left for the interpreter's end to close.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without slots, and two hosts with two sandbox slots each."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_raylet_start_wait_time_s", "240")  # machines are busy
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    hosts = [made.add_node(num_cpus=4, resources={"sandbox": 2}) for _ in range(2)]
    ray.init(address=made.address, log_to_driver=False, configure_logging=False)
    made.hosts = hosts
    yield made
    ray.shutdown()
    made.shutdown()


RAY: dict[str, Any] = {"type": "ray", "cpus": 1, "resources": {"sandbox": 1}}


async def test_actors_run_the_same_environment_where_their_resources_are(
    cluster: Any, tmp_path: Path
) -> None:
    async with inside(tmp_path, "Echo", count=4, **RAY) as run:
        rollouts = await asyncio.gather(*(run.roll_out(m, index=m) for m in range(8)))
        assert {r.outcome.ending for r in rollouts} == {"completed"}
        assert [r.info["data"] for r in rollouts] == [f"task {n}" for n in range(8)]
        pids = {int(r.metrics["pid"]) for r in rollouts}
        assert len(pids) == 4
        assert os.getpid() not in pids
        assert run.gate.granted == 8
        used = ray.cluster_resources()["sandbox"] - ray.available_resources().get("sandbox", 0.0)
        assert used == 4.0


async def test_s78_a_killed_actor_costs_its_rollouts_a_retry_and_is_replaced(
    cluster: Any, tmp_path: Path
) -> None:
    async with inside(tmp_path, "Told", {"does": "wait", "seconds": 60}, **RAY) as run:
        pending = [asyncio.create_task(run.roll_out(m)) for m in range(3)]
        await run.when(lambda: len(run.engine.requests) == 3)
        os.kill(run.pool.opened.pid, signal.SIGKILL)
        ended = await asyncio.gather(*pending)
        assert {r.outcome.cause for r in ended} == {"infrastructure"}
        await run.when(lambda: len(run.pool.workers) == 1)
        assert run.pool.deaths == 1


async def test_a_host_that_is_lost_costs_its_rollouts_a_retry_and_its_actors_start_where_there_is_room_again(
    cluster: Any, tmp_path: Path
) -> None:
    async with inside(tmp_path, "Told", {"does": "wait", "seconds": 600}, count=4, **RAY) as run:
        pending = [asyncio.create_task(run.roll_out(m)) for m in range(4)]
        await run.when(lambda: len(run.engine.requests) == 4)
        lost = cluster.hosts.pop()
        await asyncio.to_thread(cluster.remove_node, lost)
        await run.when(lambda: sum(task.done() for task in pending) == 2, within_s=120)
        assert {task.result().outcome.cause for task in pending if task.done()} == {"infrastructure"}
        assert len(run.pool.workers) == 2
        cluster.hosts.append(
            cluster.add_node(num_cpus=4, resources={"sandbox": 2})
        )  # in the main thread only
        await run.when(lambda: len(run.pool.workers) == 4, within_s=120)
        # Those on the host that was left have noticed nothing.
        assert sum(task.done() for task in pending) == 2
        for m in range(4):
            run.runner.cancel(RolloutId(0, m), "shutdown")
        assert (
            sorted(r.outcome.ending for r in await asyncio.gather(*pending))
            == ["cancelled"] * 2 + ["failed"] * 2
        )


async def test_a_deadline_reaches_into_an_actor(cluster: Any, tmp_path: Path) -> None:
    async with inside(
        tmp_path, "Told", {"does": "stubborn", "seconds": 60}, limits={"deadline_s": 1.0}, **RAY
    ) as run:
        rollout = await run.roll_out()
        assert (rollout.outcome.ending, rollout.outcome.cause, rollout.reward) == (
            "truncated",
            "deadline",
            0.25,
        )


async def test_a_retry_finds_the_new_actor(cluster: Any, tmp_path: Path) -> None:
    async with inside(tmp_path, "Told", {"does": "kill once"}, count=1, **RAY) as run:
        assert (await run.roll_out()).outcome.cause == "infrastructure"
        assert (await run.roll_out(attempt=1)).outcome.ending == "completed"


async def test_programs_of_actors_are_recorded_as_those_that_run_inline(cluster: Any, tmp_path: Path) -> None:
    gateway = Gateway(GatewaySection(), TOKENIZER, "policy")
    here = Inside(Program(), Limits(), Engine("hi"), gateway)
    try:
        inline = await here.roll_out(1, index=2)
    finally:
        await gateway.close()
    async with inside(tmp_path, "Program", engine=Engine("hi"), gateway={}, count=4, **RAY) as there:
        remote = await there.roll_out(1, index=2)
        assert (remote.outcome.ending, remote.reward, remote.info["last"]) == ("completed", 4.0, "hi")
        assert told(remote) == told(inline)
        assert there.gate.granted == here.gate.granted == 2
        # Side by side, in actors of both hosts.
        ended = await asyncio.gather(*(there.roll_out(m, group=1, index=m) for m in range(8)))
        assert {(r.outcome.ending, r.reward, len(r.turns)) for r in ended} == {("completed", 4.0, 2)}
        assert [r.messages[0].content for r in ended] == [f"task {n}" for n in range(8)]


async def test_programs_of_an_actor_that_is_killed_end_and_cost_a_retry(cluster: Any, tmp_path: Path) -> None:
    path = tmp_path / "pids"
    async with inside(tmp_path, "Program", {"pids": str(path)}, gateway={}, **RAY) as run:
        pending = asyncio.create_task(run.roll_out())
        pids = await started(run, path)
        os.kill(run.pool.opened.pid, signal.SIGKILL)
        rollout = await pending
        assert (rollout.outcome.ending, rollout.outcome.cause) == ("failed", "infrastructure")
        assert len(rollout.turns) == 2  # what it had sampled is kept
        await asyncio.to_thread(gone, pids, 10.0)


async def test_a_gateway_that_an_actors_host_cannot_reach_is_named_with_what_to_set(
    cluster: Any, tmp_path: Path
) -> None:
    async with inside(tmp_path, "Program", gateway={"public_url": "http://127.0.0.1:9"}, **RAY) as run:
        rollout = await run.roll_out()
        assert rollout.outcome.cause == "environment"
        assert "127.0.0.1:9 cannot be reached" in rollout.outcome.detail
        assert "gateway.public_url" in rollout.outcome.detail
