"""Faults of the Python client, its pool and the gateway."""

from __future__ import annotations

from faults.fault import Fault

CLIENT = [
    Fault(
        "call with effects sent again",
        "client/src/dorad/_retry.py",
        "if self._effects and (self._retry_for is None or not _had_no_effect(error)):",
        "if self._effects and self._retry_for is None:",
        "A publish whose answer was lost is published twice.",
        tests=("client/test_retry.py", "client/test_retry_for.py"),
    ),
    Fault(
        "server's hint undercut",
        "client/src/dorad/_retry.py",
        "random.uniform(1.0, 1.25)",
        "random.uniform(0.75, 1.25)",
        "Clients return before the server has room, and are refused again.",
        tests=("client/test_retry.py",),
    ),
    Fault(
        "stream begins again in the middle",
        "client/src/dorad/_retry.py",
        "if self._answered or self._retry_for == 0 or",
        "if self._retry_for == 0 or",
        "A stream that broke yields its first tokens a second time.",
        tests=("client/test_retry.py", "client/test_retry_for.py"),
    ),
]

POOL = [
    Fault(
        "pool mixes versions",
        "client/src/dorad/_pool.py",
        "wanted = history.versions[mark:] if history else []",
        "wanted = history.versions if history else []",
        "A server that missed an activation answers with old weights unnoticed.",
        tests=("client/test_pool.py", "integration/test_rollout_pool.py"),
    ),
    Fault(
        "pool trusts the number alone",
        "client/src/dorad/_pool.py",
        "fits = fits and (span.version, span.digest) in wanted",
        "fits = fits and span.version in {version for version, _ in wanted}",
        "Servers with different weights under one number answer as one.",
        tests=("client/test_pool.py",),
    ),
]

GATEWAY = [
    Fault(
        "gateway loses the last token",
        "client/src/dorad/gateway/samples.py",
        "            piece.tokens += rest.tokens\n",
        "",
        "OpenAI clients miss the end token and its logprob.",
        tests=("gateway/test_completions.py",),
    ),
    Fault(
        "aborted choice looks finished",
        "client/src/dorad/gateway/samples.py",
        't.FinishReason.ABORTED: "abort"',
        't.FinishReason.ABORTED: "stop"',
        "A trainer takes a cut answer for a whole one.",
        tests=("gateway/test_completions.py",),
    ),
    Fault(
        "unloading ends requests in flight",
        "client/src/dorad/gateway/servers.py",
        "await client.retire(wanted, version.version, timeout=timeout)",
        "await client.retire(wanted, version.version, timeout=timeout, force=True)",
        "A trainer that unloads an old policy cuts the rollouts that still use it.",
        tests=("gateway/test_rl_adapters.py",),
    ),
    Fault(
        "requests keep a replaced adapter",
        "client/src/dorad/gateway/servers.py",
        'if found.get("in_flight_policy") is None and "@" not in adapter:',
        "if False:",
        "prime-rl's rollouts in flight stay on the old policy.",
        tests=("gateway/test_rl_adapters.py",),
    ),
    Fault(
        "requests do not wait for a pause",
        "client/src/dorad/gateway/servers.py",
        "0.0 if self._servers.rl is None else timeout",
        "0.0",
        "SkyRL's training ends with an error when a request meets a pause.",
        tests=("gateway/test_rl_control.py",),
    ),
    Fault(
        "a link leads out of the roots",
        "client/src/dorad/gateway/rl/folder.py",
        "        if folder.is_relative_to(root):\n",
        "        if Path(path).is_relative_to(allowed):\n",
        "A caller with the right to publish learns which folders the gateway's host has.",
        tests=("gateway/test_rl_adapters.py",),
    ),
]
