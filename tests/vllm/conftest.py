"""A real vLLM, started once for all tests of this folder, and surely gone after them.

`make test-vllm` installs it and names its Python in PACELINE_VLLM; without that these tests are skipped, and say so.
PACELINE_VLLM_URL names a server that runs already (`make vllm-server`), for work on the tests themselves.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_kit import POLICY, URL, VLLM, Reference, Server, serving

from paceline.engines.http import Link


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(300))
            if not VLLM and not URL:
                item.add_marker(pytest.mark.skip(reason="needs a real vLLM: run `make test-vllm`"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Everything on: dev mode, processed logprobs, the route that stamps versions, 16,384 tokens of KV."""
    if URL:
        yield Server(URL, 0, Path(os.devnull))
        return
    with serving(tmp_path_factory.mktemp("vllm") / "server.log", "--max-model-len", "512") as server:
        yield server


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The small policy, and two sets of clearly other weights of its shape, in bfloat16 as it is itself."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    root, directories = tmp_path_factory.mktemp("weights"), [POLICY]
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.5)
        out = root / f"v{seed}"
        model.to(torch.bfloat16).save_pretrained(out)
        for file in POLICY.iterdir():
            if not (out / file.name).exists():
                shutil.copyfile(file, out / file.name)
        directories.append(out)
    return directories


@pytest.fixture(scope="session")
def references(weights: list[Path]) -> list[Reference]:
    return [Reference(directory) for directory in weights]


GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go on to their last token: Paceline never asks for that, and a test of cutting them short has to."""
    send = Link.send

    async def on_and_on(link: Link, method: str, path: str, body: bytes | None = None, *rest: Any) -> Any:
        if body is not None and path in (GENERATE, COMPLETIONS):
            asked = json.loads(body)
            sampling = asked.get("sampling_params", asked)
            sampling["ignore_eos"] = True
            sampling.pop("stop_token_ids", None)
            body = json.dumps(asked).encode()
        return await send(link, method, path, body, *rest)

    monkeypatch.setattr(Link, "send", on_and_on)
