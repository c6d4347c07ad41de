"""What is kept of a run on disk, and how soon it is there."""

from __future__ import annotations

from pydantic import Field

from paceline.config.base import Section


class JournalSection(Section):
    """What is kept of a run on disk, and how soon it is there: `docs/disk.md`."""

    fsync_s: float = Field(default=0.2, ge=0)
    """Seconds between commits of the journal: what a kill can lose. 0: nothing follows from a record, and nobody is told
    of it, before it is on disk."""
    file_mb: float = Field(default=64.0, gt=0)
    """Megabytes after which another file is begun, of the log and of the rollout store."""
    keep_token_steps: int | None = Field(default=None, ge=0)
    """Tokens, messages and info of rollouts are dropped that ended before the last so many batches were cut; none keeps
    all. What recovery could need stays, and so do events. Whole files go."""
    keep_token_mb: float | None = Field(default=None, gt=0)
    """The oldest are dropped while they take more megabytes than this; none keeps all."""
    backlog_mb: float = Field(default=256.0, gt=0)
    """Megabytes of records that may wait for a slow disk. When more do, no rollout starts and no model call begins until half
    of it is written."""
    full_disk_s: float = Field(default=600.0, ge=0)
    """Seconds for which the run waits while something cannot be written because the disk is full, or hangs, before it
    ends with the cause."""
