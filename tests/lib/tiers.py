"""The tiers of the tests. `make test` runs the quick one, `make test-deep` everything, and
`make check ROOM=engine` the smoke tests of one room of the server."""

import os

# By room, a folder of server or of tests/unit: tests that take seconds. Paths are below tests/.
SMOKE = {
    "adapter": [
        "integration/test_bad_adapters.py::test_all_problems_of_an_adapter_are_listed_at_once",
        "integration/test_store.py",
    ],
    "app": [
        "integration/test_shutdown.py::test_sigint_ends_an_idle_server_at_once",
        "integration/test_life.py::test_sighup_changes_what_may_change",
        "integration/test_bad_starts.py::test_bad_settings",
    ],
    "cpu": [
        "golden/test_fidelity.py::test_score_equals_oracle[llama2-dora]",
    ],
    "colocation": [
        "integration/test_sleep.py::test_answers_are_the_same_before_and_after",
    ],
    "engine": [
        "integration/test_generate_api.py",
        "integration/test_cancels.py",
    ],
    "model": [
        "integration/test_bad_starts.py::test_bad_models",
    ],
    "platform": [
        "integration/test_bad_starts.py::test_bad_configurations",
        "integration/test_metrics.py",
    ],
    "rpc": [
        "integration/test_bad_requests.py",
        "integration/test_health_reflection.py",
    ],
    "security": [
        "integration/test_tokens.py::test_roles_open_what_they_say",
        "integration/test_tls.py",
    ],
}

# Files of long tests, the longest first. They begin before the others, so that no process works on
# one of them alone at the end. Paths are below tests/.
LONG = [
    "integration/test_ray_fleet.py",
    "integration/test_http2_attacks.py",
    "integration/test_bad_network.py",
    "golden/test_invariance.py",
    "integration/test_life.py",
    "integration/test_shutdown.py",
    "integration/test_requests.py",
    "golden/test_smollm2.py",
    "integration/test_base_weights.py",
    "golden/test_in_flight.py",
    "golden/test_fidelity.py",
    "gateway/test_servers.py",
    "gateway/test_chat_images.py",
    "integration/test_exceptions.py",
    "integration/test_grpo_example.py",
    "golden/test_gpu_peers.py",
    "integration/test_prometheus.py",
    "integration/test_restarts.py",
    "integration/test_fleet.py",
    "integration/test_peers.py",
    "integration/test_nginx.py",
    "golden/test_images.py",
    "integration/test_store_crash.py",
]


def deep() -> bool:
    """Whether the long tests run, too, and the others at their full length."""
    return os.environ.get("DORAD_DEEP", "") not in ("", "0")
