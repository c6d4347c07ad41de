"""Which policy, and how its tokens are drawn."""

from __future__ import annotations

from pydantic import Field

from paceline.config.base import Section


class ModelSection(Section):
    """The policy in training."""

    name: str
    """A directory in Hugging Face form, `pkg:PACKAGE/PATH` for one inside an installed package, or a hub id."""
    served_name: str = "policy"
    """Name under which the engines serve it."""
    chat_template: str | None = None
    """Path of a Jinja chat template to use instead of the tokenizer's own."""


class SamplingSection(Section):
    """How tokens are drawn: the behaviour policy. It travels with every sample."""

    temperature: float = Field(default=1.0, gt=0, le=10)
    """Softmax temperature of training rollouts."""
    max_tokens: int = Field(default=256, ge=1)
    """Most tokens one model call may sample."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus share. Below 1 only with an engine whose logprobs are those of the processed distribution."""
    top_k: int = Field(default=-1, ge=-1)
    """Most likely tokens kept; -1 keeps all. Same restriction as `top_p`."""
    stop: tuple[str, ...] = ()
    """Strings that end a model call."""


class SamplingOverride(Section):
    """The same fields; what is left out is taken from `[sampling]`."""

    temperature: float | None = Field(default=None, gt=0, le=10)
    """Softmax temperature."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens one model call may sample."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus share."""
    top_k: int | None = Field(default=None, ge=-1)
    """Most likely tokens kept; -1 keeps all."""
    stop: tuple[str, ...] | None = None
    """Strings that end a model call."""

    def over(self, base: SamplingSection) -> SamplingSection:
        """`base` with the fields that are set here."""
        return base.model_copy(update=self.model_dump(exclude_none=True))
