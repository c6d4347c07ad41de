"""Token ids in, token ids out: the route of vLLM that programs use which keep ids themselves (`verifiers`)."""

from __future__ import annotations

from typing import Any

from paceline.runtime.gateway.asked import (
    Answered,
    Asked,
    Heading,
    Telling,
    ignored,
    stop_strings,
    whole_number,
)
from paceline.runtime.gateway.dialects.chunks import usage
from paceline.runtime.gateway.dialects.completions import checked_ids
from paceline.runtime.gateway.failures import Refused


class Generate:
    """`POST /inference/v1/generate`."""

    def read(self, body: dict[str, Any], session: Any) -> Asked:
        sampling = body.get("sampling_params") or {}
        if not isinstance(sampling, dict):
            raise Refused(400, "sampling_params must be an object", param="sampling_params")
        if body.get("stream"):
            raise Refused(400, "this route does not stream", param="stream")
        return Asked(
            token_ids=checked_ids(body.get("token_ids"), "token_ids", session),
            max_tokens=whole_number(sampling, "max_tokens"),
            stop=stop_strings(sampling),
            ignored=ignored(sampling),
            body=body,
        )

    def write(self, asked: Asked, answered: Answered, session: Any) -> dict[str, Any]:
        reply = answered.said[0].reply
        ids = reply.token_ids.tolist()
        content = [
            {"token": f"token_id:{id_}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for id_, logprob in zip(ids, reply.logprobs.tolist(), strict=True)
        ]
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": content},
            "finish_reason": answered.said[0].finish,
        }
        return {
            "request_id": answered.id,
            "choices": [choice],
            "usage": usage(answered.said),
            "prompt_logprobs": None,
        }

    def telling(self, asked: Asked, heading: Heading, session: Any) -> Telling:
        raise Refused(400, "this route does not stream", param="stream")

    def error(self, refused: Refused) -> dict[str, Any]:
        return refused.openai()
