"""The Open Inference Protocol v2, over gRPC with Triton's own client, and over HTTP."""

import json
import queue
import struct

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from lib.gateway import running_gateway
from lib.server import wait_until
from tritonclient.utils import InferenceServerException

IDS = [1, 40, 77, 120, 33]
SAMPLED = {"max_tokens": 12, "temperature": 1.0, "seed": 11}
OUTPUTS = ["output_ids", "logprobs", "text_output", "finish_reason"]


@pytest.fixture(scope="module")
def client(gateway):
    with triton.InferenceServerClient(gateway.grpc) as it:
        yield it


def ids_input(ids=IDS, dtype=np.int64, shape=None):
    array = np.array(ids, dtype).reshape(shape or [1, len(ids)])
    name = {"int64": "INT64", "int32": "INT32"}[array.dtype.name]
    it = triton.InferInput("input_ids", list(array.shape), name)
    it.set_data_from_numpy(array)
    return it


def text_input(words):
    it = triton.InferInput("text_input", [1], "BYTES")
    it.set_data_from_numpy(np.array([words.encode()], np.object_))
    return it


def wanted(*names):
    return [triton.InferRequestedOutput(name) for name in names]


def sample_of(grpc_client, **options):
    (sample,) = grpc_client.generate(IDS, logprobs="raw", **{**SAMPLED, **options})
    return sample


# --- gRPC -----------------------------------------------------------------------------------------


def test_tells_that_it_lives_and_what_it_has(client, base):
    assert client.is_server_live() and client.is_server_ready()
    assert client.get_server_metadata().name == "dorad"
    assert client.is_model_ready(base) and client.is_model_ready("dora")
    assert client.is_model_ready("dora", "1") and not client.is_model_ready("dora", "9")
    assert not client.is_model_ready("nobody") and not client.is_model_ready(base, "1")
    found = client.get_model_metadata("dora")
    assert list(found.versions) == ["1"] and found.platform == "dorad"
    assert {t.name: t.datatype for t in found.inputs} == {
        "input_ids": "INT64",
        "text_input": "BYTES",
    }
    assert {t.name for t in found.outputs} == set(OUTPUTS)
    with pytest.raises(InferenceServerException, match="NOT_FOUND"):
        client.get_model_metadata("nobody")
    index = client.get_model_repository_index()
    rows = {(row.name, row.version): row.state for row in index.models}
    assert rows == {(base, ""): "READY", ("dora", "1"): "READY", ("lora", "1"): "READY"}


@pytest.mark.parametrize(("model", "version"), [(None, ""), ("dora", ""), ("dora", "1")])
def test_tokens_and_logprobs_are_those_of_the_grpc_client(
    client, grpc_client, base, text, model, version
):
    answer = client.infer(
        model or base,
        [ids_input()],
        model_version=version,
        request_id="mine",
        outputs=wanted(*OUTPUTS),
        parameters=SAMPLED,
    )
    sample = sample_of(grpc_client, adapter=model)
    assert answer.as_numpy("output_ids").tolist() == [sample.token_ids.tolist()]
    assert answer.as_numpy("logprobs").tolist() == [sample.logprobs.tolist()]
    shown = answer.as_numpy("text_output")[0].decode()
    assert shown == text.decode([i for i in sample.token_ids if i != 2])
    assert answer.as_numpy("finish_reason")[0].decode() == sample.finish_reason.value
    response = answer.get_response()
    assert response.id == "mine" and response.model_version == ("1" if model else "")
    assert response.parameters["prompt_tokens"].int64_param == len(IDS)
    assert response.parameters["digest"].string_param == sample.spans[0].digest


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs_are_of_the_mode_that_is_asked_for(client, grpc_client, base, mode):
    options = {**SAMPLED, "temperature": 0.7, "top_k": 5}
    answer = client.infer(
        base,
        [ids_input()],
        outputs=wanted("logprobs"),
        parameters={**options, "logprobs_mode": mode},
    )
    (sample,) = grpc_client.generate(IDS, logprobs=mode, **options)
    assert answer.as_numpy("logprobs").tolist() == [sample.logprobs.tolist()]


def test_only_the_outputs_asked_for_come_and_three_by_default(client, base):
    def names(answer):
        return [output.name for output in answer.get_response().outputs]

    options = {"inputs": [ids_input()], "parameters": {"max_tokens": 1}}
    assert names(client.infer(base, outputs=wanted("logprobs"), **options)) == ["logprobs"]
    assert names(client.infer(base, **options)) == ["output_ids", "text_output", "finish_reason"]


def test_a_text_is_encoded_and_may_stop_at_a_string(client, grpc_client, base, text):
    options = {"max_tokens": 30, "temperature": 0.0}
    whole = client.infer(base, [text_input("héllo")], parameters=options)
    (sample,) = grpc_client.generate(text.encode("héllo"), **options)
    assert whole.as_numpy("output_ids")[0].tolist() == sample.token_ids.tolist()
    words = whole.as_numpy("text_output")[0].decode()
    stop = words[6:10]
    cut = client.infer(base, [text_input("héllo")], parameters={**options, "stop": stop})
    assert cut.as_numpy("text_output")[0].decode() == words[: words.find(stop)]
    assert cut.as_numpy("finish_reason")[0] == b"stop"


def test_inputs_may_be_int32_and_without_a_batch_dimension(client, base):
    answers = [
        client.infer(base, [given], parameters=SAMPLED).as_numpy("output_ids").tolist()
        for given in (ids_input(), ids_input(dtype=np.int32), ids_input(shape=[5]))
    ]
    assert answers[0] == answers[1] == answers[2]


def test_contents_may_stand_in_their_lists(gateway, grpc_client, base):
    """As clients send that are no Triton's, such as grpcurl."""
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    request = service_pb2.ModelInferRequest(model_name=base)
    tensor = request.inputs.add(name="input_ids", datatype="INT64", shape=[1, 5])
    tensor.contents.int64_contents.extend(IDS)
    for name, value in (("max_tokens", 12), ("seed", 11)):
        request.parameters[name].int64_param = value
    with grpc.insecure_channel(gateway.grpc) as channel:
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=20)
    ids = np.frombuffer(answer.raw_output_contents[0], "<i8")
    assert ids.tolist() == sample_of(grpc_client).token_ids.tolist()


@pytest.mark.parametrize(
    ("inputs", "parameters", "words"),
    [
        ([], {}, "INPUTS_INVALID"),
        ([ids_input(), text_input("x")], {}, "INPUTS_INVALID"),
        ([ids_input(shape=[5, 1])], {}, "TENSOR_INVALID"),
        ([ids_input([1, -7])], {}, "TENSOR_INVALID"),
        ([ids_input([1, 2**40])], {}, "TENSOR_INVALID"),
        ([ids_input([1, 5000])], {}, "TOKEN_ID_OUT_OF_RANGE"),
        ([ids_input()], {"max_token": 3}, "FIELD_UNKNOWN"),
        ([ids_input()], {"max_tokens": "3"}, "FIELD_INVALID"),
        ([ids_input()], {"temperature": -1.0}, "TEMPERATURE_OUT_OF_RANGE"),
    ],
)
def test_a_bad_request_is_refused_with_its_reason(client, base, inputs, parameters, words):
    with pytest.raises(InferenceServerException, match=words) as caught:
        client.infer(base, inputs, parameters=parameters)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_an_unknown_model_version_or_output_is_refused(client, base):
    for model, version, code in (
        ("nobody", "", "NOT_FOUND"),
        ("dora", "9", "NOT_FOUND"),
        (base, "1", "NOT_FOUND"),
        ("Bad Name", "", "INVALID_ARGUMENT"),
    ):
        with pytest.raises(InferenceServerException) as caught:
            client.infer(model, [ids_input()], model_version=version)
        assert caught.value.status() == f"StatusCode.{code}"
    with pytest.raises(InferenceServerException, match="OUTPUT_UNKNOWN"):
        client.infer(base, [ids_input()], outputs=wanted("logits"))


def test_raw_bytes_that_are_no_tensor_are_refused(gateway, base):
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    with grpc.insecure_channel(gateway.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for name, datatype, raw in (
            ("input_ids", "INT64", b"\0" * 7),
            ("input_ids", "INT64", b"\0" * 16),
            ("input_ids", "FP64", b"\0" * 8),
            ("text_input", "BYTES", b"\xff\xff\xff\xffx"),
            ("text_input", "BYTES", struct.pack("<I", 2) + b"\xff\xfe"),
        ):
            request = service_pb2.ModelInferRequest(model_name=base, raw_input_contents=[raw])
            request.inputs.add(name=name, datatype=datatype, shape=[1])
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(request, timeout=20)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (name, datatype)


def stream(client, requests):
    """All answers of one stream: (results by request id, errors)."""
    arrived = queue.Queue()
    client.start_stream(lambda result, error: arrived.put((result, error)))
    try:
        for model, request_id, parameters in requests:
            client.async_stream_infer(
                model, [ids_input()], request_id=request_id, outputs=wanted(*OUTPUTS),
                parameters=parameters, enable_empty_final_response=True,
            )  # fmt: skip
        results, errors, left = {}, [], len(requests)
        while left:
            result, error = arrived.get(timeout=30)
            if error is not None:
                errors.append(error)
                left -= 1
                continue
            response = result.get_response()
            results.setdefault(response.id, []).append(result)
            left -= response.parameters["triton_final_response"].bool_param
        return results, errors
    finally:
        client.stop_stream()


def test_streams_of_several_requests_join_to_their_own_answers(client, grpc_client, base):
    models = {f"r{i}": [base, "dora", "lora"][i % 3] for i in range(9)}
    requests = [(m, i, {**SAMPLED, "seed": int(i[1:])}) for i, m in models.items()]
    results, errors = stream(client, requests)
    assert errors == []
    for name, model in models.items():
        parts = results[name]
        sample = sample_of(
            grpc_client, adapter=None if model == base else model, seed=int(name[1:])
        )
        ids = np.concatenate([p.as_numpy("output_ids")[0] for p in parts]).tolist()
        logprobs = np.concatenate([p.as_numpy("logprobs")[0] for p in parts]).tolist()
        assert (ids, logprobs) == (sample.token_ids.tolist(), sample.logprobs.tolist())
        reasons = [p.as_numpy("finish_reason")[0].decode() for p in parts]
        assert reasons[-1] == sample.finish_reason.value and not any(reasons[:-1])


def test_a_failed_request_leaves_the_others_of_its_stream(client, base):
    results, errors = stream(
        client, [("nobody", "bad", SAMPLED), (base, "good", SAMPLED), (base, "x", {"n": 1})]
    )
    assert len(errors) == 2 and set(results) == {"good"}
    assert any("ADAPTER_NOT_FOUND" in str(e) for e in errors)


def test_ending_a_stream_cancels_on_the_server(gateway, grpc_client, base):
    for _ in range(5):
        with triton.InferenceServerClient(gateway.grpc) as client:
            arrived = queue.Queue()
            client.start_stream(lambda result, error, it=arrived: it.put((result, error)))
            client.async_stream_infer(
                base, [ids_input()], parameters={"max_tokens": 150, "ignore_eos": True}
            )
            arrived.get(timeout=20)
            client.stop_stream(cancel_requests=True)
    wait_until(lambda: grpc_client.info().engine.running_sequences == 0, what="all requests ended")


# --- HTTP -----------------------------------------------------------------------------------------


def test_http_tells_that_it_lives_and_what_it_has(http, base):
    assert http.get("/v2/health/live").json() == {"live": True}
    assert http.get("/v2/health/ready").status_code == 200
    assert http.get("/v2").json()["name"] == "dorad"
    for path, status in (
        (f"{base}/ready", 200),
        ("dora/versions/1/ready", 200),
        ("dora/versions/9/ready", 404),
        ("nobody/ready", 404),
        ("nobody", 404),
    ):
        assert http.get(f"/v2/models/{path}").status_code == status, path
    assert http.get("/v2/models/dora").json()["versions"] == ["1"]
    index = http.post("/v2/repository/index", json={"ready": True}).json()
    assert {row["name"] for row in index} == {base, "dora", "lora"}
    assert http.post("/v2/repository/index").json() == index


@pytest.mark.parametrize("nested", [False, True])
def test_http_infer_gives_tokens_as_json(http, grpc_client, nested):
    body = {
        "id": "mine",
        "inputs": [
            {
                "name": "input_ids",
                "datatype": "INT64",
                "shape": [1, 5],
                "data": [IDS] if nested else IDS,
            }
        ],
        "outputs": [{"name": "output_ids"}, {"name": "logprobs"}],
        "parameters": SAMPLED,
    }
    answer = http.post("/v2/models/dora/versions/1/infer", json=body).json()
    sample = sample_of(grpc_client, adapter="dora")
    ids, logprobs = answer["outputs"]
    assert ids["data"] == sample.token_ids.tolist() and ids["shape"] == [1, len(ids["data"])]
    assert np.float32(logprobs["data"]).tolist() == sample.logprobs.tolist()
    assert answer["id"] == "mine" and answer["model_version"] == "1"


def test_http_infer_takes_and_gives_binary_tensors(http, grpc_client, base):
    raw = np.array(IDS, "<i8").tobytes()
    row = {"name": "input_ids", "datatype": "INT64", "shape": [1, 5]}
    head = json.dumps(
        {
            "inputs": [{**row, "parameters": {"binary_data_size": len(raw)}}],
            "outputs": [
                {"name": "finish_reason"},
                {"name": "output_ids", "parameters": {"binary_data": True}},
            ],
            "parameters": SAMPLED,
        }
    ).encode()
    headers = {"inference-header-content-length": str(len(head))}
    answer = http.post(f"/v2/models/{base}/infer", content=head + raw, headers=headers)
    length = int(answer.headers["inference-header-content-length"])
    reason, ids = json.loads(answer.content[:length])["outputs"]
    tail = answer.content[length:]
    assert len(tail) == ids["parameters"]["binary_data_size"]
    sample = sample_of(grpc_client)
    assert np.frombuffer(tail, "<i8").tolist() == sample.token_ids.tolist()
    assert reason["data"] == [sample.finish_reason.value]


@pytest.mark.parametrize(
    ("head", "tail", "length"),
    [
        ({"inputs": []}, b"", None),
        ({"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1]}]}, b"", None),
        ({"inputs": [{"name": "x", "datatype": "INT64", "shape": [-1], "data": [1]}]}, b"", None),
        (
            {"inputs": [{"name": "x", "datatype": "INT64", "shape": [1], "data": [1.5]}]},
            b"",
            None,
        ),
        (
            {"inputs": [{"name": "x", "datatype": "INT64", "shape": [1], "data": [1]}]},
            b"extra",
            None,
        ),
        ({}, b"", 10_000),
        ({}, b"", -1),
    ],
)
def test_a_bad_http_infer_is_refused(http, base, head, tail, length):
    data = json.dumps(head).encode()
    headers = {"inference-header-content-length": str(len(data) if length is None else length)}
    answer = http.post(f"/v2/models/{base}/infer", content=data + tail, headers=headers)
    assert answer.status_code == 400 and ": " in answer.json()["error"]


@pytest.mark.parametrize("element", [None, 5, True, {"a": 1}])
def test_only_strings_are_elements_of_bytes(http, base, element):
    row = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [element]}
    answer = http.post(f"/v2/models/{base}/infer", json={"inputs": [row]})
    assert answer.status_code == 400 and "TENSOR_INVALID" in answer.json()["error"]


def test_a_web_page_cannot_infer(http, base):
    """Without a type, as some clients send it, only where no browser names an origin."""
    row = {"name": "input_ids", "datatype": "INT64", "shape": [1], "data": [1]}
    body = json.dumps({"inputs": [row], "parameters": {"max_tokens": 1}}).encode()
    path = f"/v2/models/{base}/infer"
    assert http.post(path, content=body).status_code == 200
    assert http.post(path, content=body, headers={"origin": "http://x"}).status_code == 415
    kind = {"content-type": "text/plain"}
    assert http.post(path, content=body, headers=kind).status_code == 415


def test_generate_takes_text_and_parameters_beside_it(http, grpc_client, text):
    body = {"text_input": "héllo", "parameters": {"max_tokens": 8}, "temperature": 0}
    answer = http.post("/v2/models/lora/generate", json=body).json()
    (sample,) = grpc_client.generate(
        text.encode("héllo"), adapter="lora", max_tokens=8, temperature=0
    )
    assert answer["output_ids"] == sample.token_ids.tolist()
    assert answer["text_output"] == text.decode([i for i in sample.token_ids if i != 2])
    assert answer["model_version"] == "1" and answer["parameters"]["completion_tokens"] == 8


def test_generate_stream_joins_to_generate(http, base):
    body = {"input_ids": IDS, **SAMPLED}
    whole = http.post(f"/v2/models/{base}/generate", json=body).json()
    with http.stream("POST", f"/v2/models/{base}/generate_stream", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(e["text_output"] for e in events) == whole["text_output"]
    assert [i for e in events for i in e["output_ids"]] == whole["output_ids"]
    assert events[-1]["finish_reason"] == whole["finish_reason"]
    answer = http.post("/v2/models/nobody/generate_stream", json=body)
    assert answer.status_code == 404 and "ADAPTER_NOT_FOUND" in answer.json()["error"]


def test_without_a_tokenizer_there_are_token_ids_only(server, grpc_client, base, tmp_path):
    with (
        running_gateway(server.grpc, "--grpc-listen", "127.0.0.1:0", scratch=tmp_path) as running,
        triton.InferenceServerClient(running.grpc) as client,
    ):
        answer = client.infer(base, [ids_input()], parameters=SAMPLED)
        ids = answer.as_numpy("output_ids")[0].tolist()
        assert ids == sample_of(grpc_client).token_ids.tolist()
        assert answer.as_numpy("text_output") is None
        for inputs, outputs in (([text_input("x")], None), ([ids_input()], ["text_output"])):
            with pytest.raises(InferenceServerException, match="TOKENIZER_NOT_CONFIGURED"):
                client.infer(base, inputs, outputs=outputs and wanted(*outputs))
