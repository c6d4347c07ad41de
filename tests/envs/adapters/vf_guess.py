"""An environment of verifiers with a world of its own: guess a number, from higher and lower."""

import itertools

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class GuessData(vf.TaskData):
    hidden: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    pass


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for n in itertools.count():
            yield GuessTask(GuessData(prompt="Guess: 1 to 15", hidden=1 + 7 * n % 15), self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        guesses = 0
        found = False
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                guesses += 1
                said = segment.last_reply
                found = said == str(task.data.hidden)
                if found or guesses == 4:
                    break
                if not said.isdigit():
                    segment = await interaction.turn("a number, please")
                else:
                    segment = await interaction.turn("higher" if int(said) < task.data.hidden else "lower")
        interaction.trace.record_reward("found", 1.0 / guesses if found else 0.0, 1.0)
        interaction.trace.record_metric("guesses", float(guesses))
