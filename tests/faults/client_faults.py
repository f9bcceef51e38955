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

FLEET = [
    Fault(
        "half of the members suffice",
        "client/src/dorad/fleet/coordinator.py",
        "if 2 * len(ready) <= len(manifest.members):",
        "if 2 * len(ready) < len(manifest.members):",
        "Two halves of a fleet commit different versions.",
        tests=("client/fleet/test_fleet_scale.py",),
    ),
    Fault(
        "members in repair take part in no publish",
        "client/src/dorad/fleet/coordinator.py",
        "for target in self._answered if members.get(target, late) < late}",
        "for target in self._answered\n            if members.get(target, late) < late"
        " and reasons.get(target, late) is None}",
        "A version that no member has kept never comes back to a member that has lost it.",
        tests=("client/fleet/test_fleet_repair.py",),
    ),
    Fault(
        "members without a version are asked for it",
        "client/src/dorad/fleet/coordinator.py",
        "if not any(h.version == release.version and h.ready for h in found.get(sender, ())):",
        "if not found:",
        "A member that returns gets no prompts for half a minute.",
        tests=("client/fleet/test_fleet_repair.py",),
    ),
    Fault(
        "a coordinator decides after it was taken over",
        "client/src/dorad/fleet/manifest.py",
        "    if prepared.coordinator != coordinator:\n",
        "    if not coordinator:\n",
        "A version that was given up becomes the fleet's.",
        tests=("client/fleet/test_fleet_manifest.py",),
    ),
    Fault(
        "a manifest is replaced by an older one",
        "client/src/dorad/fleet/manifest_store.py",
        "if self._read().generation != expected:",
        "if self._read().generation < expected:",
        "Two processes commit different versions, and one of them is lost.",
        tests=("client/fleet/test_fleet_manifest.py",),
    ),
    Fault(
        "prompts name no digest",
        "client/src/dorad/fleet/manifest.py",
        'return f"{ref}@{committed.version}:{committed.digest}" if committed else ref',
        'return f"{ref}@{committed.version}" if committed else ref',
        "A member with other weights under the number answers.",
        tests=("client/fleet/test_fleet_manifest.py",),
    ),
    Fault(
        "a first version is used before its commit is read",
        "client/src/dorad/fleet/servers.py",
        "            raise unknown(adapter)\n",
        "            return request\n",
        "The first prompts for a new adapter fail.",
        tests=("client/fleet/test_fleet_prompts.py",),
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
