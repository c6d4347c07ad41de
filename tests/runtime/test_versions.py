"""A rollout that is continued under newer weights, from the engine's replies to the batch."""

from __future__ import annotations

import numpy as np
from test_runner import END, Script, World, one_call, outcome, reply

from paceline.core.samples import build_samples
from paceline.core.staleness import staleness


def test_a_rollout_over_three_versions_trains_with_three_runs_and_counts_from_the_oldest() -> None:
    engine = Script(reply([5, 6], "abort", 1), reply([7], "abort", 2), reply([8, 9, END], "stop", 3))
    rollout = World(one_call, engine).run()
    assert outcome(rollout) == ("completed", None)
    (sample,) = build_samples(rollout, seq_len=512, overlong="drop").samples
    assert sample.versions == ((1, 2), (2, 1), (3, 3))
    assert np.asarray(sample.token_ids)[sample.trainable].tolist() == [5, 6, 7, 8, 9, END]
    assert sample.oldest_version == rollout.oldest_version == 1
    # Step 5 trains v4.
    assert staleness(rollout.oldest_version, step=5) == 3
