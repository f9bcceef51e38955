"""Configuration and statistics of models in Triton's shape, and errors below /v2."""

import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf.json_format import MessageToDict, ParseDict
from lib.gateway import running_gateway
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "client"))

from fake_server import FakeServer, unavailable

IDS = [5, 6]


@pytest.fixture(scope="module")
def client(gateway):
    with triton.InferenceServerClient(gateway.grpc) as it:
        yield it


def ids_input():
    it = triton.InferInput("input_ids", [len(IDS)], "INT64")
    it.set_data_from_numpy(np.array(IDS, np.int64))
    return it


# --- Configuration --------------------------------------------------------------------------------


def test_a_models_configuration_is_that_of_its_metadata(client, grpc_client, base):
    config = client.get_model_config("dora").config
    metadata = client.get_model_metadata("dora")
    assert (config.name, config.platform, config.max_batch_size) == ("dora", metadata.platform, 0)
    for tensors, others in (
        (config.input, metadata.inputs),
        (config.output, metadata.outputs),
    ):
        types = {t.name: model_config_pb2.DataType.Name(t.data_type) for t in tensors}
        names = {"INT64": "TYPE_INT64", "FP32": "TYPE_FP32", "BYTES": "TYPE_STRING"}
        assert types == {t.name: names[t.datatype] for t in others}
        assert {t.name: list(t.dims) for t in tensors} == {t.name: list(t.shape) for t in others}
    assert all(tensor.optional for tensor in config.input)  # One of them is enough.
    assert list(config.version_policy.specific.versions) == [1]
    assert config.model_transaction_policy.decoupled
    assert config.parameters["base_model"].string_value == base
    length = grpc_client.info().model.context_length
    assert config.parameters["context_length"].string_value == str(length)


@pytest.mark.parametrize("model", ["dora", None])
def test_the_configuration_over_http_is_that_over_grpc(client, http, base, model):
    model = model or base
    answer = http.get(f"/v2/models/{model}/config").json()
    # An unknown field or a wrong type would be an error.
    parsed = ParseDict(answer, model_config_pb2.ModelConfig())
    assert parsed == client.get_model_config(model).config
    assert client.get_model_config(model, as_json=True)["config"]["name"] == model
    assert parsed.HasField("version_policy") == (model == "dora")


def test_the_configuration_of_what_is_not_there_is_not_found(client, http, base):
    for model, version in (("nobody", ""), ("dora", "9"), (base, "1")):
        with pytest.raises(InferenceServerException) as caught:
            client.get_model_config(model, version)
        assert caught.value.status() == "StatusCode.NOT_FOUND"
        with pytest.raises(InferenceServerException) as caught:
            client.get_inference_statistics(model, version)
        assert caught.value.status() == "StatusCode.NOT_FOUND"
    for path in ("nobody/config", "nobody/stats", "dora/versions/9/stats"):
        answer = http.get(f"/v2/models/{path}")
        assert answer.status_code == 404 and "ADAPTER_NOT_FOUND: " in answer.json()["error"]


def test_a_version_has_the_configuration_of_its_name(http):
    paths = ("/v2/models/dora/config", "/v2/models/dora/versions/1/config")
    one, other = (http.get(path).json() for path in paths)
    assert one == other


# --- Statistics -----------------------------------------------------------------------------------


@pytest.fixture
def counting(server, folder, tmp_path):
    """A gateway that has served nothing."""
    arguments = ["--tokenizer", folder, "--grpc-listen", "127.0.0.1:0"]
    with running_gateway(server.grpc, *arguments, scratch=tmp_path) as running:
        yield running


def rows_of(message):
    return {(row.name, row.version): row for row in message.model_stats}


def test_statistics_count_the_requests_of_each_version(counting, base):
    began = round(time.time() * 1000)
    parameters = {"max_tokens": 3, "ignore_eos": True}
    with (
        triton.InferenceServerClient(counting.grpc) as client,
        httpx.Client(base_url=counting.url, timeout=30) as http,
    ):
        before = rows_of(client.get_inference_statistics())
        assert set(before) == {(base, ""), ("dora", "1"), ("lora", "1")}
        assert all(row.inference_count == row.last_inference == 0 for row in before.values())
        for model, version in (("dora", ""), ("dora", "1"), (base, "")):
            client.infer(model, [ids_input()], model_version=version, parameters=parameters)
        body = {"input_ids": IDS, **parameters}
        with http.stream("POST", "/v2/models/dora/generate_stream", json=body) as answer:
            assert len(list(filter(None, answer.iter_lines()))) >= 1
        # What is wrong counts nowhere.
        assert http.post("/v2/models/nobody/generate", json=body).status_code == 404
        wrong = {**body, "temperature": -1}
        assert http.post("/v2/models/lora/generate", json=wrong).status_code == 400

        after = rows_of(client.get_inference_statistics())
        assert set(after) == set(before)
        counts = {key: row.inference_count for key, row in after.items()}
        assert counts == {(base, ""): 1, ("dora", "1"): 3, ("lora", "1"): 0}
        row = after["dora", "1"]
        stats = row.inference_stats
        assert row.execution_count == 3 and row.last_inference >= began
        assert stats.success.count == stats.queue.count == stats.compute_infer.count == 3
        assert stats.success.ns >= stats.compute_infer.ns > 0
        assert stats.fail.count == stats.cache_hit.count == stats.compute_input.count == 0

        (only,) = client.get_inference_statistics("dora").model_stats
        assert only == row
        (only,) = client.get_inference_statistics("dora", "1").model_stats
        assert only == row
        (only,) = client.get_inference_statistics(base).model_stats
        assert only == after[base, ""]
        for path, count in (("models/stats", 3), ("models/dora/versions/1/stats", 1)):
            answer = http.get(f"/v2/{path}").json()
            parsed = ParseDict(answer, service_pb2.ModelStatisticsResponse())
            assert len(parsed.model_stats) == count and rows_of(parsed)["dora", "1"] == row


def test_what_fails_on_the_server_is_counted_as_failed(folder, tmp_path):
    with (
        FakeServer() as fake,
        running_gateway(fake.target, "--tokenizer", folder, scratch=tmp_path) as running,
        httpx.Client(base_url=running.url, timeout=30) as http,
    ):
        fake.refuse_generate = [unavailable]
        body = {"input_ids": IDS, "max_tokens": 2}
        for status in (503, 200):
            answer = http.post("/v2/models/fake-model/generate", json=body)
            assert answer.status_code == status
        (row,) = http.get("/v2/models/fake-model/stats").json()["model_stats"]
    assert row["inference_stats"]["fail"]["count"] == row["inference_count"] == 1


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v2/nothing", 404, "ROUTE_NOT_FOUND"),
        ("POST", "/v2/repository/models/dora/load", 404, "ROUTE_NOT_FOUND"),
        ("GET", "/v2/models/dora/infer", 405, "METHOD_NOT_ALLOWED"),
        ("POST", "/v2", 405, "METHOD_NOT_ALLOWED"),
    ],
)
def test_what_is_not_served_below_v2_is_told_in_the_protocols_form(
    http, method, path, status, code
):
    answer = http.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"} and answer.json()["error"].startswith(f"{code}: ")
    assert ("allow" in answer.headers) == (status == 405)


def test_elsewhere_it_is_told_in_openais_form(http):
    for path in ("/v1/nothing", "/v2nothing", "/nothing"):
        answer = http.get(path)
        assert answer.json()["error"]["code"] == "ROUTE_NOT_FOUND", path


def test_the_server_names_its_extensions(client, http):
    extensions = {"model_configuration", "statistics", "model_repository"}
    assert extensions <= set(client.get_server_metadata().extensions)
    assert extensions <= set(http.get("/v2").json()["extensions"])
    assert MessageToDict(client.get_inference_statistics())["modelStats"]
