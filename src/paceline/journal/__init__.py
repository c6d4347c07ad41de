"""The append-only journal and the rollout store. `docs/journal.md` describes the files.

RUN/journal/000001.log holds events and commands, RUN/rollouts/000001.seg the rollouts with their token arrays.
"""

from __future__ import annotations

from paceline.journal.files import dropped_before
from paceline.journal.reader import Record, read_extras, read_journal, read_rollouts
from paceline.journal.writer import FileJournal

__all__ = ["FileJournal", "Record", "dropped_before", "read_extras", "read_journal", "read_rollouts"]
