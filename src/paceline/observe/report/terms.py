"""What the words of the report mean, for a reader who has not met them: shown where one points at a word."""

from __future__ import annotations

from typing import Final

TERMS: Final[dict[str, str]] = {
    # the head
    "held-out reward": "Mean reward on tasks that are never trained on: whether the policy got better, not only better "
    "at what it has seen.",
    "goodput": "Share of the tokens sampled for training that reached an optimizer step. The rest was spent on rollouts "
    "that had nothing to teach, grew stale, failed or were cut.",
    "tokens sampled": "Tokens that the engines generated, prompts not counted.",
    "throughput": "Tokens sampled per second, over all engines.",
    "staleness": "Optimizer steps between the policy that sampled a rollout and the policy that is trained on it. 0 is "
    "strictly on-policy.",
    "wall time": "From the first rollout to the end, in real time.",
    # charts
    "reward": "Mean score of the rollouts that ended since the batch before, by their environment; dots are held-out "
    "tasks.",
    "length": "Sampled tokens of a rollout. Drawn: all that ended. Trained: those that reached the trainer. A gap means "
    "that training prefers short (or long) ones.",
    "endings": "How rollouts end other than by themselves. Truncated: a limit (turns, tokens, context, deadline) cut it. "
    "Failed: environment or engine. Cancelled: by the run, as too stale or not needed.",
    "where tokens went": "What became of the sampled tokens whose rollouts were settled in each step.",
    "inference against environment": "Where a rollout's time goes: model calls (sampling), gate wait (its next call waits "
    "for room on an engine, or for new weights), and the environment's own code and tools.",
    "within-group reward variance": "Spread of rewards within a group (the rollouts of one task). Without spread there "
    "is nothing to prefer, and nothing to learn from.",
    "signal": "Groups without signal: all their rollouts earned the same. Batch with advantage: share of the batch that "
    "pushes the policy anywhere.",
    "step time": "Seconds from batch to batch; the trainer's part of it; and loading new weights into an engine.",
    "drawn share": "Share of each environment in the rollouts started so far.",
    "trained share": "Share of each environment in the rollouts trained on so far; below its drawn share, it loses more "
    "on the way.",
    "length bias": "Lengths trained on against lengths drawn.",
    # the trainer
    "loss": "What the optimizer minimizes. In reinforcement learning its value says little: it need not fall while the "
    "reward rises.",
    "mismatch kl": "KL divergence between the policy as the engine computed it and as the trainer computes it, over the "
    "tokens of the batch, in nats. It is near 0 when both hold the same weights; it grows with staleness, and large "
    "values mean that the engine samples from something else than what is trained.",
    "mismatch k1": "The same KL divergence by its plain estimate: unbiased but noisy, so it may be negative.",
    "logprob gap max": "The largest difference between the engine's and the trainer's log-probability of a token, in "
    "nats.",
    "ratio mean": "Importance ratio, averaged: how much more probable a sampled token is under the policy being trained "
    "than under the one that sampled it. 1 when they are the same.",
    "ratio max": "The largest importance ratio of a token. A large one would let a single token dominate the step; "
    "clipping bounds it.",
    "ess": "Effective sample size, as a share: how many of the batch's tokens are as good as on-policy ones, given how "
    "uneven their importance ratios are. 1 is all of them; a low value says that the batch is too stale.",
    "clip fraction": "Share of tokens whose importance ratio left the clip range, so that they no longer pull the policy "
    "further that way.",
    "entropy": "How undecided the policy is about the next token, in nats. Falling to 0, it has stopped exploring.",
    "kl reference": "KL divergence from the reference policy (the model before training), in nats: how far training has "
    "gone. 0 when no reference is used.",
    "grad norm": "Length of the gradient before clipping. Jumps are a sign of trouble.",
    "lr": "Learning rate of this step.",
    "tokens": "Trainable tokens of the batch.",
    # where tokens went
    "shipped": "In a batch that was sent to the trainer.",
    "queued": "Scored, and waiting for its batch.",
    "in flight": "Of rollouts that were still running.",
    "zero signal": "All rollouts of the group earned the same, so none is better than the others: nothing to learn.",
    "filtered": "Removed by a filter of [filters]: repetition, gibberish or length.",
    "stale": "Older, in optimizer steps, than max_staleness allows when its batch was due.",
    "failed": "Of rollouts that ended with an error of the environment or the engine.",
    "cancelled": "Of rollouts that the run ended itself, for example when its last batch was full.",
    "truncated": "Of rollouts that a limit cut and that nobody scored, or that do not train by config.",
    "overlong": "Beyond batch.seq_len, the longest sample the trainer takes.",
    "void": "Of groups scored whole (all_or_nothing) in which a member had no score.",
    "left over": "Scored, but the run ended before another batch was full.",
    "discarded": "Thrown away by the scheduling policy, as when more rollouts were started than a batch takes, or refused "
    "by a gate of the environment (env.gates; the metrics gated/<gate> say by which).",
    "deferred": "Put off by the scheduling policy, and sampled again from the beginning with the same noise.",
    "eval": "Sampled for evals, not for training.",
    "grouped": "Ended, and waiting for the rest of its group.",
    # the account
    "sampled": "Tokens sampled, counted as the engines answered: the sum of the places before it, if nothing was lost.",
    "conserved": "Whether every token and every rollout is in exactly one place.",
    "prefill computed": "Prompt tokens that the engines had to compute.",
    "cached": "Prompt tokens that the engines still held in their prefix cache, from the group's other members or the "
    "rollout's own turns before.",
    "recomputed": "Prompt tokens that an engine computed again for the same rollout, because it no longer held them: "
    "memory was short, or new weights came in.",
}
"""By the word as it is written in the report, in lower case."""
