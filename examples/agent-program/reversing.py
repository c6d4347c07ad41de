"""Trains the agent beside this file: it writes a word backwards into a file."""

import itertools
import sys
from pathlib import Path

from paceline.envs import ListTasks, ProgramEnv, ProgramRun

SYLLABLES = ["ba", "ke", "lo", "mi", "su", "ta"]


class Reversing(ProgramEnv):
    def tasks(self, split):
        words = ["".join(parts) for parts in itertools.permutations(SYLLABLES, 2)]
        return ListTasks([word for n, word in enumerate(words) if (n % 10 == 9) == (split == "eval")])

    def command(self, data, folder):
        return [sys.executable, str(Path(__file__).with_name("agent.py")), data]

    def score(self, data, run: ProgramRun):
        said = (run.folder / "answer.txt").read_text() if run.exit_code == 0 else ""
        return sum(a == b for a, b in zip(said, data[::-1], strict=False)) / len(data)
