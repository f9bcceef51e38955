"""Who may ask the gateway for what."""

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

COMPLETION = {"prompt": [5, 6], "max_tokens": 1}


def bearers(*values):
    return [("authorization", value) for value in values]


def code_of(target, method, metadata, base):
    """How a call of the Open Inference Protocol ends."""
    requests = {
        "ModelReady": service_pb2.ModelReadyRequest(name=base),
        "ModelMetadata": service_pb2.ModelMetadataRequest(name=base),
        "RepositoryIndex": service_pb2.RepositoryIndexRequest(),
        "ModelInfer": service_pb2.ModelInferRequest(model_name=base),
        "ModelStreamInfer": iter([service_pb2.ModelInferRequest(model_name=base)]),
        "ServerLive": service_pb2.ServerLiveRequest(),
        "ServerReady": service_pb2.ServerReadyRequest(),
        "ServerMetadata": service_pb2.ServerMetadataRequest(),
    }
    with grpc.insecure_channel(target) as channel:
        call = getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), method)
        try:
            answer = call(requests[method], timeout=20, metadata=metadata)
            if method == "ModelStreamInfer":
                list(answer)
        except grpc.RpcError as error:
            return error.code().name
    return "OK"


# --- Authorization that could be anybody's --------------------------------------------------------

AMBIGUOUS = [
    bearers("Bearer one", "Bearer two"),
    bearers("Bearer one", "Bearer one"),
    bearers("Bearer one", "Basic dTpw"),
    bearers("Basic dTpw"),
    bearers("Bearer"),
    bearers("Bearer one two"),
    bearers("Bearer one, Bearer two"),
    bearers("one"),
]


@pytest.mark.parametrize("headers", AMBIGUOUS)
def test_several_or_malformed_authorizations_are_401_over_http(http, base, headers):
    body = {"model": base, **COMPLETION}
    answer = http.post("/v1/completions", json=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "TOKEN_INVALID")
    assert answer.headers["www-authenticate"] == "Bearer"
    answer = http.get(f"/v2/models/{base}", headers=headers)
    assert answer.status_code == 401 and answer.json()["error"].startswith("TOKEN_INVALID: ")
    assert http.get("/health", headers=headers).status_code == 200


@pytest.mark.parametrize("metadata", AMBIGUOUS)
def test_several_or_malformed_authorizations_are_unauthenticated_over_grpc(gateway, base, metadata):
    for method in ("ModelMetadata", "ModelStreamInfer"):
        assert code_of(gateway.grpc, method, metadata, base) == "UNAUTHENTICATED"
    assert code_of(gateway.grpc, "ServerReady", metadata, base) == "OK"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_of_a_token_may_be_written_as_one_likes(gateway, http, base, scheme):
    headers = bearers(f"{scheme} one")
    assert http.get(f"/v1/models/{base}", headers=headers).status_code == 200
    assert code_of(gateway.grpc, "ModelMetadata", headers, base) == "OK"
