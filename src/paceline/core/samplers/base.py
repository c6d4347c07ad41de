"""What a sampler is, and tasks that are drawn by weight in O(log n)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from paceline.core.streams import key, uniform
from paceline.errors import ConfigError


class TaskSampler(Protocol):
    """Draws tasks of one finite source. Derive from it, or just look like it, and name your class in the config as
    `module:Class`; it is made with `(size, seed, **sampler_args)`.

    Pure: the n-th draw depends on the seed, n, and what was `seen` before.
    """

    def __init__(self, size: int, seed: int, **args: Any) -> None: ...

    def draw(self, number: int) -> int:
        """The index of the `number`-th draw, counted from 0."""
        ...

    def seen(self, index: int, mean: float | None, variance: float | None) -> None:
        """A group of task `index` has closed: mean and variance of the rewards that voted, None when none did."""
        ...

    def snapshot(self) -> Mapping[str, Any]:
        """State for `restore`; msgpack-able."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class SumTree:
    """Weights of n things: change one, or find the one at a point of their sum, in O(log n).

    A binary tree in an array, each node the sum of its two children. (A Fenwick tree would save half the memory, and
    drift: it adds differences, and this one adds children.)
    """

    __slots__ = ("_leaves", "_tree", "size")

    def __init__(self, size: int, weight: float) -> None:
        self.size = size
        self._leaves = 1 << max(0, size - 1).bit_length()
        tree = [0.0] * (2 * self._leaves)
        tree[self._leaves : self._leaves + size] = [weight] * size
        for node in range(self._leaves - 1, 0, -1):
            tree[node] = tree[2 * node] + tree[2 * node + 1]
        self._tree = tree

    @property
    def total(self) -> float:
        return self._tree[1] if self._leaves > 1 else self._tree[self._leaves]

    def __getitem__(self, index: int) -> float:
        return self._tree[self._leaves + index]

    def __setitem__(self, index: int, weight: float) -> None:
        tree, node = self._tree, self._leaves + index
        tree[node] = weight
        node >>= 1
        while node:
            tree[node] = tree[2 * node] + tree[2 * node + 1]
            node >>= 1

    def find(self, point: float) -> int:
        """The index in whose stretch of [0, total) the point lies."""
        tree, node = self._tree, 1
        while node < self._leaves:
            node *= 2
            if point >= tree[node] and tree[node + 1] > 0:
                point -= tree[node]
                node += 1
        return min(node - self._leaves, self.size - 1)


class ByWeight(TaskSampler):
    """Tasks drawn, with replacement, by a weight that depends on how their last groups went.

    An estimate is a running mean of group means that leans to recent ones by `decay`; a task that has not been seen for
    `forget` epochs' worth of draws counts as unseen again, since the policy is another one by then.
    """

    def __init__(
        self, size: int, seed: int, *, unseen: float = 1.0, decay: float = 0.5, forget: float | None = 10.0
    ) -> None:
        if not 0 < decay <= 1:
            raise ConfigError(f"decay is {decay}; it is the share of the newest group, above 0 and at most 1")
        if unseen <= 0 or (forget is not None and forget <= 0):
            raise ConfigError(f"unseen ({unseen}) and forget ({forget}) must be above 0")
        self.size = size
        self._key = key(seed, "tasks")
        self._unseen = unseen
        self._decay = decay
        self._forget = None if forget is None else max(1, round(forget * size))
        self._tree = SumTree(size, unseen)
        self._known: dict[int, tuple[float, int]] = {}
        """Estimate by task, and the draw at which it was made."""
        self._line: deque[tuple[int, int]] = deque()
        """(draw, task) of estimates in order of age; one that was renewed since is passed over."""
        self._draws = 0

    def weight(self, mean: float) -> float:
        """What a task with this estimate weighs; above 0."""
        raise NotImplementedError

    def draw(self, number: int) -> int:
        self._draws = number
        self._forget_old()
        return self._tree.find(uniform(self._key, number) * self._tree.total)

    def seen(self, index: int, mean: float | None, variance: float | None) -> None:
        if mean is None or not 0 <= index < self.size:
            return
        known = self._known.get(index)
        estimate = mean if known is None else known[0] + self._decay * (mean - known[0])
        self._known[index] = (estimate, self._draws)
        self._line.append((self._draws, index))
        self._tree[index] = max(1e-9, self.weight(estimate))

    def estimate(self, index: int) -> float | None:
        """What is known of a task; None when nothing is."""
        known = self._known.get(index)
        return None if known is None else known[0]

    def _forget_old(self) -> None:
        if self._forget is None:
            return
        line = self._line
        while line and line[0][0] + self._forget < self._draws:
            made, index = line.popleft()
            known = self._known.get(index)
            if known is not None and known[1] == made:
                del self._known[index]
                self._tree[index] = self._unseen

    def snapshot(self) -> Mapping[str, Any]:
        return {
            "draws": self._draws,
            "known": [[index, mean, made] for index, (mean, made) in self._known.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._draws = state["draws"]
        for index, mean, made in sorted(state["known"], key=lambda known: known[2]):
            self._known[index] = (mean, made)
            self._line.append((made, index))
            self._tree[index] = max(1e-9, self.weight(mean))
