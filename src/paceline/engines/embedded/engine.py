"""The embedded engine: requests in, tokens out, one forward pass a step.

All of it runs on one thread. Whatever changes the engine does so between two steps, so a weight swap, a
pause or an abort never tears one. Weights are numbered by epochs; a token is stamped with the epoch that
sampled it. A swap makes running sequences recompute their KV, unless the pause before it asked to keep it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tokenizers import Tokenizer

from paceline.engines.embedded.invariant import TILE, invariant_batch
from paceline.engines.embedded.model import AttentionGroup, Batch, Decoder
from paceline.engines.embedded.options import EngineOptions
from paceline.engines.embedded.sampling import SamplingParams, sample, splitmix64, uniforms
from paceline.engines.embedded.scheduler import FinishReason, Request, RequestError, Scheduler
from paceline.engines.embedded.weights import ModelSpec, Weights, eos_ids
from paceline.errors import ConfigError, InvariantError

PauseMode = Literal["abort", "wait", "keep"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Engine:
    """Idle when constructed. ConfigError if model, cache and context do not fit together."""

    def __init__(self, options: EngineOptions) -> None:
        model, self.block_size, self._dtype = Path(options.model), options.block_size, DTYPES[options.dtype]
        self.options, self.spec = options, ModelSpec.read(model)
        spec, self.num_blocks = self.spec, options.kv_tokens // self.block_size
        capacity = self.num_blocks * self.block_size
        self.max_len = options.max_model_len or min(spec.max_positions, capacity)
        if not 2 <= self.max_len <= min(spec.max_positions, capacity):
            raise ConfigError(
                f"max_model_len {self.max_len} must be at least 2 and fit the model's {spec.max_positions} positions "
                f"and the KV cache's {capacity} tokens: lower it, or raise kv_tokens"
            )
        self.decoder = self.load(model)
        self.scheduler = Scheduler(
            self.num_blocks, self.block_size, options.max_num_seqs, options.max_batched_tokens, self.max_len
        )
        shape = (2, spec.kv_heads, self.num_blocks + 1, self.block_size, spec.head_dim)
        self._cache = [torch.zeros(shape, dtype=self._dtype) for _layer in range(spec.layers)]
        planes = np.arange(2 * spec.kv_heads) * (self.num_blocks + 1)
        self._block_planes, self._slot_planes = planes.reshape(-1, 1, 1), planes * self.block_size
        self._eos, tokenizer = eos_ids(model), model / "tokenizer.json"
        self.tokenizer: Tokenizer | None = Tokenizer.from_file(str(tokenizer)) if tokenizer.exists() else None
        self.paused: PauseMode | None = None
        self.held: deque[Request] = deque()
        """Arrived while paused; they wait for `resume`."""
        self._keeps_kv = False
        self._on_idle: list[Callable[[], object]] = []
        self._labels, self._arrivals = [options.weight_version], 0

    # ---- requests

    def request(
        self,
        id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        on_done: Callable[[Request], object],
        salt: str | None = None,
    ) -> Request:
        """A checked request, not yet added. RequestError says what is wrong with it."""
        vocab = self.spec.vocab_size
        if not prompt:
            raise RequestError("the prompt is empty: at least one token is needed")
        if len(prompt) >= self.max_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but prompt and output together are limited to {self.max_len}"
            )
        for token in (*prompt, *(params.stop_token_ids or ())):
            if not 0 <= token < vocab:
                raise RequestError(
                    f"token id {token} is out of vocabulary: the model has ids 0 to {vocab - 1}"
                )
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and the model directory has no tokenizer.json")
        self._arrivals += 1
        return Request(
            id=id,
            ids=list(prompt),
            prompt_tokens=len(prompt),
            token_limit=min(self.max_len, len(prompt) + (params.max_tokens or self.max_len)),
            params=params,
            seed=_own_seed(self.options.seed, self._arrivals) if params.seed is None else params.seed % 2**64,
            eos=frozenset() if params.ignore_eos else self._eos,
            stop_ids=frozenset(params.stop_token_ids or ()),
            salt=salt,
            on_done=on_done,
            arrived=time.monotonic(),
        )

    def add(self, request: Request) -> None:
        (self.held if self.paused else self.scheduler.waiting).append(request)

    def abort(self, ids: set[str] | None) -> int:
        """End these requests (None: all) with the tokens so far; returns how many there were."""
        live = [*self.scheduler.running, *self.scheduler.waiting, *self.held]
        found = [request for request in live if ids is None or request.id in ids]
        for request in found:
            self._finish(request, "abort")
        return len(found)

    def text(self, request: Request) -> str:
        """The output decoded, up to a stop string; empty without a tokenizer."""
        if request.stop_text is not None or self.tokenizer is None:
            return request.stop_text or ""
        return self.tokenizer.decode(request.output, skip_special_tokens=request.params.skip_special_tokens)

    def version_spans(self, request: Request) -> list[tuple[str, int, int]]:
        """(weight version, start, end) over the output tokens, half-open."""
        ends = [start for _epoch, start in request.spans[1:]] + [len(request.logprobs)]
        return [
            (self._labels[epoch], start, end)
            for (epoch, start), end in zip(request.spans, ends, strict=False)
        ]

    # ---- control

    @property
    def has_work(self) -> bool:
        return self.paused != "keep" and bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def weight_version(self) -> str:
        return self._labels[-1]

    def pause(self, mode: PauseMode, clear_cache: bool, on_paused: Callable[[], object]) -> None:
        """`keep` freezes requests, `abort` ends them, `wait` lets them end; `on_paused` is called after that."""
        self.paused, self._keeps_kv = mode, not clear_cache
        if mode == "abort":
            self.abort(None)
        if clear_cache and mode != "wait":
            self.scheduler.drop_kv()
        if mode == "keep":
            on_paused()
        else:
            self._on_idle.append(on_paused)
            self._tell_if_idle()

    def resume(self) -> None:
        self.paused, self._keeps_kv = None, False
        self.scheduler.waiting.extend(self.held)
        self.held.clear()
        self._tell_paused()

    def load(self, directory: Path) -> Decoder:
        """Read and check new weights; the running ones stay. WireError names what does not fit."""
        tile = TILE if self.options.batch_invariant else None
        return Decoder(self.spec, Weights(directory, self.spec), self._dtype, self.max_len, tile)

    def swap(self, decoder: Decoder, version: str | None = None) -> None:
        """Sample from these weights from the next step on. No version: the label stays until `relabel`."""
        self.decoder = decoder
        self.scheduler.epoch += 1
        self._labels.append(version if version is not None else self.weight_version)
        if self._keeps_kv:
            self.scheduler.pool.forget_all()
            for request in self.scheduler.running:
                request.publishes = False
        else:
            self.scheduler.drop_kv()

    def relabel(self, version: str) -> None:
        """Name the current weights, for tokens already sampled from them too."""
        self._labels[-1] = version

    def _tell_if_idle(self) -> None:
        if self._on_idle and not self.scheduler.running and not self.scheduler.waiting:
            if not self._keeps_kv:
                self.scheduler.drop_kv()
            self._tell_paused()

    def _tell_paused(self) -> None:
        callbacks, self._on_idle = self._on_idle, []
        for callback in callbacks:
            callback()

    # ---- one step

    @torch.inference_mode()
    def step(self) -> None:
        """One forward pass over what the scheduler plans; finished requests are reported before it returns."""
        planned = self.scheduler.plan(time.monotonic())
        if not planned:
            waiting = len(self.scheduler.waiting)
            raise InvariantError(f"{waiting} requests wait, nothing runs, and none fits: blocks have leaked")
        # Decodes together; prefills with those of about their length, so that padding at most doubles them.
        planned.sort(key=_group_of)
        batch = self._invariant(planned) if self.options.batch_invariant else self._batch(planned)
        logits = self.decoder.forward(batch, self._cache)
        ready = []
        for request, count in planned:
            request.computed += count
            if request.computed == len(request.ids):
                ready.append(request)
        self.scheduler.counters.steps += 1
        if ready:
            self._sample(ready, logits)

    def _invariant(self, planned: list[tuple[Request, int]]) -> Batch:
        return invariant_batch(
            planned, self.scheduler.table, self.block_size, self._block_planes, self._slot_planes
        )

    def _batch(self, planned: list[tuple[Request, int]]) -> Batch:
        size, table = self.block_size, self.scheduler.table
        positions, rows_of, groups, last, offset = [], [], list[AttentionGroup](), list[int](), 0
        for _length, members in groupby(planned, key=_group_of):
            pairs = list(members)
            rows = np.array([request.row for request, _count in pairs])
            starts = np.array([request.computed for request, _count in pairs])
            counts = np.array([count for _request, count in pairs])
            queries, ends = int(counts.max()), starts + counts
            at = starts[:, None] + np.arange(queries)
            blocks = table[rows, : -(-int(ends.max()) // size)]
            hidden = np.arange(blocks.shape[1] * size) > at[:, :, None]
            mask = torch.from_numpy(np.where(hidden, np.float32("-inf"), np.float32(0))).to(self._dtype)
            pick = real = None
            firsts = offset + np.cumsum(counts) - counts
            if int(counts.min()) < queries:
                is_real = np.arange(queries) < counts[:, None]
                padded = firsts[:, None] + np.minimum(np.arange(queries), counts[:, None] - 1)
                pick, real = torch.from_numpy(padded.reshape(-1)), torch.from_numpy(np.flatnonzero(is_real))
                at = at[is_real]
            gather = torch.from_numpy((self._block_planes + blocks).reshape(-1))
            groups.append(AttentionGroup(len(pairs), queries, gather, mask, pick, real))
            positions.append(at.reshape(-1))
            rows_of.append(np.repeat(rows, counts))
            offset += int(counts.sum())
            last += [
                int(first) + count - 1
                for first, (request, count) in zip(firsts, pairs, strict=True)
                if request.computed + count == len(request.ids)
            ]
        position = np.concatenate(positions)
        slots = table[np.concatenate(rows_of), position // size] * size + position % size
        return Batch(
            ids=torch.tensor([id for r, count in planned for id in r.ids[r.computed : r.computed + count]]),
            positions=torch.from_numpy(position),
            slots=torch.from_numpy(slots[:, None] + self._slot_planes),
            groups=groups,
            last=None if len(last) == offset else torch.tensor(last, dtype=torch.int64),
        )

    def _sample(self, ready: list[Request], logits: torch.Tensor) -> None:
        for row, request in enumerate(ready):
            if len(request.logprobs) < request.params.min_tokens:
                logits[row, list(request.eos | request.stop_ids)] = float("-inf")
        # Where the logits are padded, the draws are: what is drawn for the padding is left out below.
        rows = ready + ready[:1] * (len(logits) - len(ready))
        noise = uniforms([r.seed for r in rows], [len(r.ids) for r in rows])
        tile = TILE if self.options.batch_invariant else 1
        ids, logprobs = sample(logits, [r.params for r in rows], noise, tile)
        now, epoch = time.monotonic(), self.scheduler.epoch
        self.scheduler.counters.generation_tokens += len(ready)
        for request, id, logprob in zip(ready, ids, logprobs, strict=False):
            if not request.spans or request.spans[-1][0] != epoch:
                request.spans.append((epoch, len(request.logprobs)))
                request.first_token = request.first_token or now
            request.ids.append(id)
            request.logprobs.append(logprob)
            reason = self._ending(request, id)
            if reason is not None:
                self._finish(request, reason)
            elif request.on_token is not None:
                request.on_token(request)

    def _ending(self, request: Request, id: int) -> FinishReason | None:
        if id in request.eos:
            return "stop"
        if id in request.stop_ids:
            request.stop_reason = id
            return "stop"
        if request.params.stop is not None and len(request.logprobs) >= request.params.min_tokens:
            found = self._stop_string(request)
            if found is not None:
                request.stop_reason = found
                return "stop"
        return "length" if len(request.ids) >= request.token_limit else None

    def _stop_string(self, request: Request) -> str | None:
        """The stop string that the newest token completed; cuts the text there, as vLLM does."""
        strings, params = request.params.stop_strings, request.params
        if self.tokenizer is None or not strings:
            return None
        # A token holds at least one byte of a character of at most four, so this tail holds the longest one.
        tail = request.ids[max(request.prompt_tokens, len(request.ids) - 4 * max(map(len, strings)) - 4) :]
        if not any(stop in self.tokenizer.decode(tail, params.skip_special_tokens) for stop in strings):
            return None
        text = self.tokenizer.decode(request.output, params.skip_special_tokens)
        at, stop = min(((text.find(stop), stop) for stop in strings if stop in text), default=(-1, None))
        if stop is not None:
            request.stop_text = text[: at + len(stop)] if params.include_stop_str_in_output else text[:at]
        return stop

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request in self.held:
            self.held.remove(request)
        else:
            self.scheduler.remove(request)
        request.finish_reason, request.finished = reason, time.monotonic()
        request.on_done(request)
        self._tell_if_idle()


def _own_seed(engine: int, arrival: int) -> int:
    """Of a request that brings none, from the seed of the engine, however large that is."""
    own, upper = (engine * 2**32 + arrival) % 2**64, (engine >> 32) % 2**64
    mixed = splitmix64(np.array([own, upper], np.uint64))
    return int(mixed[0] ^ mixed[1])  # of an upper half of 0 it is 0: small seeds are as they are


def _group_of(planned: tuple[Request, int]) -> int:
    return planned[1].bit_length()
