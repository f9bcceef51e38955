"""What of a request's headers is passed on to the server."""

import httpx
from lib.gateway import running_gateway
from lib.gateway_clients import COMPLETION


def test_each_request_carries_its_own_token_id_and_trace(fake, fake_http):
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for token, request_id in (("one", "id-1"), ("two", "id-2"), (None, "bad id!")):
        headers = {"x-request-id": request_id, "traceparent": trace if token else "nonsense"}
        headers |= {"authorization": f"Bearer {token}"} if token else {}
        answer = fake_http.post("/v1/completions", json=COMPLETION, headers=headers)
        assert answer.status_code == 200
        seen = fake.metadata[-1]
        assert seen.get("authorization") == (f"Bearer {token}" if token else None)
        assert seen.get("traceparent") == (trace if token else None)
        assert answer.headers["x-request-id"] == seen["x-request-id"]
        assert (seen["x-request-id"] == request_id) == (token is not None)
        assert fake.generate_calls[-1].request_id.startswith(seen["x-request-id"])
    ids = [call.request_id for call in fake.generate_calls]
    assert len(set(ids)) == 3


def test_the_gateways_own_token_is_never_lent_to_a_caller(fake, folder, tmp_path):
    with running_gateway(
        fake.target, "--tokenizer", folder, scratch=tmp_path, DORAD_TOKEN="own-secret"
    ) as running:
        assert httpx.post(f"{running.url}/v1/completions", json=COMPLETION).status_code == 200
    assert "authorization" not in fake.metadata[-1]
