"""The HTTP of SkyRL, prime-rl and AReaL against a gateway, with the standard library alone.

    doractl gateway --rl --adapter-root /runs
    python client/examples/http_rollouts.py [--url http://127.0.0.1:8000] /runs/step-1 /runs/step-2

For each folder of an adapter: load it under one name, sample groups of answers from token ids, and
print their log-probabilities with the version that made them. At the end the name is unloaded.
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

NAME = "policy"
PROMPTS = [[1, 40, 77, 120], [1, 9, 33], [1, 64, 65, 66, 67]]


class Gateway:
    """Its routes; an error is printed with all its problems, and ends the program."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def post(self, route: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"{self._url}{route}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=3600) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{route}: {json.load(error)['error']['message']}") from None

    def sample(self, prompt: list[int], tokens: int) -> list[dict[str, Any]]:
        """Four answers to one prompt."""
        answer = self.post(
            "/inference/v1/generate",
            token_ids=prompt,
            model=NAME,
            # Of the policy that the trainer computes: log-softmax of logits / temperature.
            sampling_params={
                "n": 4,
                "max_tokens": tokens,
                "temperature": 0.7,
                "logprobs": 1,
                "logprobs_mode": "scaled",
            },
        )
        choices: list[dict[str, Any]] = answer["choices"]
        return choices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("adapters", nargs="+", type=Path, help="folders below --adapter-root")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the gateway")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer, at most")
    options = parser.parse_args()
    gateway = Gateway(options.url)
    for folder in options.adapters:
        loaded = gateway.post(
            "/v1/load_lora_adapter", lora_name=NAME, lora_path=str(folder.resolve())
        )
        print(f"{folder.name}: version {loaded['version']}, {loaded['digest'][:12]}")
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            groups = list(threads.map(lambda ids: gateway.sample(ids, options.tokens), PROMPTS))
        for prompt, choices in zip(PROMPTS, groups, strict=True):
            for choice in choices:
                logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
                (span,) = choice["dorad"]["spans"]
                print(
                    f"  {prompt} -> {choice['token_ids']} ({choice['finish_reason']}), "
                    f"logprob {sum(logprobs):.3f}, version {span['version']}"
                )
    gateway.post("/v1/unload_lora_adapter", lora_name=NAME)


if __name__ == "__main__":
    main()
