"""An environment of verifiers with two agents that both play on the policy: one answers, the other judges the answer."""

import verifiers.v1 as vf

__all__ = ["DuelEnv", "DuelTaskset"]


class DuelData(vf.TaskData):
    answer: str


class DuelTask(vf.Task[DuelData, vf.State, vf.TaskConfig]):
    pass


class DuelTaskset(vf.Taskset[DuelTask, vf.TasksetConfig]):
    def load(self):
        for left in range(1, 6):
            for right in range(1, 6):
                data = DuelData(prompt=f"Compute: {left}+{right}", answer=str(left + right))
                yield DuelTask(data, self.config.task)


class BrokenTask(vf.Task):
    async def setup(self, trace, runtime):
        raise RuntimeError("no judge today")


class DuelConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()
    broken: bool = False
    """The critic's part fails, which the environment puts up with."""
    verdicts: int = 1
    """Times the critic is asked."""


class DuelEnv(vf.Env[DuelConfig]):
    async def run(self, task, agents):
        solution = await agents.solver.run(task)
        question = vf.TaskData(prompt=f"{task.data.prompt} is {solution.last_reply}?")
        for _ in range(self.config.verdicts):
            await agents.critic.run((BrokenTask if self.config.broken else vf.Task)(question))

    async def finalize(self, task, episode):
        is_right = False
        for trace in episode.traces:
            if trace.agent.name == "solver":
                is_right = trace.last_reply == task.data.answer
                trace.record_reward("right", float(is_right), 1.0)
            elif trace.ok:
                trace.record_reward("noticed", 10.0 * float((trace.last_reply == "yes") == is_right), 1.0)
