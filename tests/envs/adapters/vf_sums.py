"""A taskset of verifiers, as the hub has them: sums, with a reward and a metric."""

import verifiers.v1 as vf

__all__ = ["SumTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def exact(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward()
    async def digits(self, trace) -> float:
        return 0.25 * float(trace.last_reply.isdigit())

    @vf.metric()
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    most: int = 9


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for left in range(1, self.config.most + 1):
            for right in range(1, self.config.most + 1):
                data = SumData(prompt=f"Compute: {left}+{right}", answer=str(left + right))
                yield SumTask(data, self.config.task)
