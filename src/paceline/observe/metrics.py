"""Every metric by name, with its unit and what exactly it counts. Docs, Prometheus help and the report read this.

Names are paths. `train/<scope>/…` is about one training environment, or `all` of them together; `eval/<env>/…`
about one held-out measurement. The *window* of a step is everything finalised since the batch before was cut: a
rollout is finalised once, when its group was processed (an attempt that is retried: when the retry starts).
*Shipped* rollouts are those of the batch itself; they may have been finalised in an earlier window. A metric whose
denominator is zero is left out of the row, never written as 0.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Metric(NamedTuple):
    """A documented name. `<…>` in it stands for one part of a path."""

    name: str
    unit: str
    help: str


METRICS: tuple[Metric, ...] = (
    Metric("train/<scope>/rollouts", "rollouts", "Finalised in the window."),
    Metric("train/<scope>/reward", "", "Mean reward of the scored rollouts of the window."),
    Metric("train/<scope>/reward_all", "", "The same over every rollout of the window; one without a score counts 0."),
    Metric("train/<scope>/reward_shipped", "", "Mean reward of the rollouts in the batch."),
    Metric("train/<scope>/rewards/<part>", "", "Mean of one named part of the reward, over scored rollouts."),
    Metric("train/<scope>/rewards_all/<part>", "", "The same over every rollout; one without a score counts 0."),
    Metric("train/<scope>/completed", "share", "Rollouts of the window that completed."),
    Metric("train/<scope>/truncated", "share", "Rollouts of the window that ran into a budget."),
    Metric("train/<scope>/failed", "share", "Rollouts of the window that failed (the error rate)."),
    Metric("train/<scope>/cancelled", "share", "Rollouts of the window that were cancelled."),
    Metric("train/<scope>/filtered", "share", "Rollouts of the window that a filter kept out of training."),
    Metric("train/<scope>/zero_signal", "share", "Rollouts of the window without advantage."),
    Metric("train/<scope>/flagged/<filter>", "share", "Rollouts of the window that a filter detected, enforced or not."),
    Metric("train/<scope>/gated", "share", "Rollouts of the window whose group a gate refused (env.gates); once one has."),
    Metric("train/<scope>/gated/<gate>", "share", "The same by gate: the first that refused."),
    Metric("train/<scope>/groups", "groups", "Groups processed in the window."),
    Metric("train/<scope>/groups_zero_signal", "share", "Groups of the window whose members all earned the same."),
    Metric("train/<scope>/group_variance", "", "Mean within-group variance of the reward, over groups that voted."),
    Metric("train/<scope>/shipped", "rollouts", "Rollouts in the batch."),
    Metric("train/<scope>/trainable", "share", "Rollouts in the batch with an advantage that is not zero."),
    Metric("train/<scope>/length", "tokens", "Mean sampled tokens of a rollout of the window."),
    Metric("train/<scope>/length_shipped", "tokens", "Mean sampled tokens of a rollout in the batch."),
    Metric("train/<scope>/sample_generated", "tokens", "Mean trainable tokens of a sample in the batch, before cutting."),
    Metric("train/<scope>/sample_trained", "tokens", "The same after cutting."),
    Metric("train/<scope>/sample_cut", "share", "Samples in the batch that were cut to the sequence length."),
    Metric("train/<scope>/turns", "turns", "Mean model calls of a rollout of the window."),
    Metric("train/<scope>/model_s", "s", "Mean seconds of a rollout in model calls."),
    Metric("train/<scope>/gate_s", "s", "Mean seconds of a rollout at the turn gate."),
    Metric("train/<scope>/env_s", "s", "Mean seconds of a rollout in its environment."),
    Metric("train/<scope>/drawn_share", "share", "Of the rollouts drawn so far, those of this environment."),
    Metric("train/<scope>/shipped_share", "share", "Of the rollouts shipped so far, those of this environment."),
    Metric("train/<scope>/length_bias", "ratio", "Mean length of all shipped rollouts so far / of all responses drawn; 1 is unbiased."),
    Metric("lengths/<env>/median", "tokens", "What the scheduling policy has learnt: median of the log-normal part."),
    Metric("lengths/<env>/deviation", "", "Standard deviation of the log of the length."),
    Metric("lengths/<env>/group_share", "share", "Of that variance, what the rollouts of a group have in common."),
    Metric("lengths/<env>/runaways", "share", "Rollouts that go to their limit."),
    Metric("lengths/<env>/p90", "tokens", "What nine of ten rollouts are not expected to pass."),
    Metric("lengths/<env>/judged", "rollouts", "Compared so far with what was predicted for them."),
    Metric("lengths/<env>/mean_rank", "", "Mean rank in their predictions; 0.5 is neither too long nor too short."),
    Metric("lengths/<env>/inside_half", "share", "Within the middle half of their predictions."),
    Metric("lengths/<env>/inside_90", "share", "Within the middle 90% of their predictions."),
    Metric("staleness/mean", "steps", "Over the rollouts of the batch: steps from their oldest token to this one."),
    Metric("staleness/max", "steps", "The largest of them."),
    Metric("tokens/sampled", "tokens", "Sampled since the batch before, train and eval."),
    Metric("tokens/prefill", "tokens", "Prompt tokens that engines computed since the batch before."),
    Metric("tokens/prefill_cached", "tokens", "Prompt tokens whose KV they still had."),
    Metric("tokens/prefill_recomputed", "tokens", "Computed although an engine had had them for the same rollout."),
    Metric("tokens/to/<fate>", "tokens", "Tokens that settled since the batch before, by where they went."),
    Metric("tokens/stale_trained", "tokens", "Found staler than the bound since the batch before; they train all the same."),
    Metric("goodput", "share", "Tokens shipped so far / tokens sampled for training so far, in flight included."),
    Metric("throughput/sampled", "tokens/s", "tokens/sampled over time/step_s."),
    Metric("throughput/shipped", "tokens/s", "Trained tokens of the batch over time/step_s."),
    Metric("batch/rollouts", "rollouts", "In the batch."),
    Metric("batch/tokens", "tokens", "Tokens of every sample of the batch, prompts included; 0 in a journal without them."),
    Metric("batch/bytes", "bytes", "Size of the batch as shipped."),
    Metric("time/step_s", "s", "From the cut of the batch before (or the start) to this one."),
    Metric("time/pack_s", "s", "Packing the batch."),
    Metric("time/send_s", "s", "Putting it where the trainer reads."),
    Metric("time/train_s", "s", "From there to the trainer's acknowledgement, its queue included."),
    Metric("time/update_s", "s", "Mean over the engine updates since the batch before."),
    Metric("trainer/<name>", "", "What the trainer measured in this step."),
    Metric("in_flight/train", "rollouts", "Started and not ended."),
    Metric("in_flight/eval", "rollouts", "Started and not ended."),
    Metric("queued", "rollouts", "In the batch list."),
    Metric("engine/<engine>/running", "requests", "As the engine last said."),
    Metric("engine/<engine>/waiting", "requests", "As the engine last said."),
    Metric("engine/<engine>/kv_usage", "share", "As the engine last said."),
    Metric("eval/<env>/reward", "", "Mean reward of the scored rollouts of the epoch (avg@k)."),
    Metric("eval/<env>/pass@<k>", "share", "Unbiased pass@k; only where rewards are binary."),
    Metric("eval/<env>/rollouts", "rollouts", "Rollouts of the epoch."),
    Metric("eval/<env>/scored", "rollouts", "Those of them that have a reward."),
    Metric("eval/<env>/length", "tokens", "Mean sampled tokens of a rollout."),
    Metric("eval/<env>/newest_version", "steps", "The newest version that sampled in the epoch."),
    Metric("eval/<env>/<ending>", "share", "Rollouts of the epoch that ended so."),
    Metric("disk/<part>", "bytes", "Of the run directory: events, tokens, batches, weights, checkpoints, other; free on its disk."),
    Metric("monitor/dropped", "rows", "Rows that sinks lost so far, because one was slow or broken."),
)  # fmt: skip


def _pattern(name: str) -> re.Pattern[str]:
    # An environment's or an engine's name may hold slashes; a fixed part may not.
    return re.compile("(.+)".join(re.escape(part) for part in re.split(r"<[^>]+>", name)))


_PATTERNS = [(_pattern(metric.name), metric) for metric in METRICS]


def metric_of(name: str) -> Metric | None:
    """What a name in a row means; None for a name that is not documented."""
    return next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)
