"""Support of the Python tests: tiny models, perturbed adapters, the oracle, servers, the wire."""
