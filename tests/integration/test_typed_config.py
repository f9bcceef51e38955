"""A configuration given as fields of the wire contract means what the file means."""

import json

import grpc
import pytest
from dorad.v1 import adapters_pb2, types_pb2
from lib.server import Server, serve
from lib.wire import failure

KINDS = ["dora", "lora", "rslora", "dora_patterns", "dora_layers", "dora_exclude", "lora_regex"]


@pytest.fixture(scope="module")
def server(zoo):
    with serve(zoo.model("llama2")) as running:
        yield running


def selector(value) -> adapters_pb2.ModuleSelector | None:
    if value is None:
        return None
    if isinstance(value, str):
        return adapters_pb2.ModuleSelector(regex=value)
    return adapters_pb2.ModuleSelector(list=adapters_pb2.ModuleNames(names=value))


def typed(config: dict) -> adapters_pb2.PeftConfig:
    layers = config["layers_to_transform"]
    return adapters_pb2.PeftConfig(
        r=config["r"],
        lora_alpha=config["lora_alpha"],
        use_dora=config["use_dora"],
        use_rslora=config["use_rslora"],
        target_modules=selector(config["target_modules"]),
        exclude_modules=selector(config["exclude_modules"]),
        rank_pattern=[
            adapters_pb2.RankPattern(pattern=k, rank=v) for k, v in config["rank_pattern"].items()
        ],
        alpha_pattern=[
            adapters_pb2.AlphaPattern(pattern=k, alpha=v)
            for k, v in config["alpha_pattern"].items()
        ],
        layers_to_transform=[layers] if isinstance(layers, int) else layers,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_fields_and_file_give_one_digest(server: Server, zoo, kind: str) -> None:
    folder = zoo.adapter("llama2", kind)
    config = json.loads((folder / "adapter_config.json").read_text())
    image = (folder / "adapter_model.safetensors").read_bytes()
    name = kind.replace("_", "-")
    by_file = server.wire.publish(f"file-{name}", folder).adapter
    by_fields = server.wire.publish_bytes(f"fields-{name}", "", image, peft_config=typed(config))
    assert by_fields.adapter.digest == by_file.digest
    assert by_fields.adapter.kind == by_file.kind
    assert by_fields.adapter.state == types_pb2.ADAPTER_STATE_READY


def test_refusals_name_the_fields_of_the_message(server: Server, zoo) -> None:
    folder = zoo.adapter("llama2", "dora")
    config = json.loads((folder / "adapter_config.json").read_text())
    image = (folder / "adapter_model.safetensors").read_bytes()
    config |= {"r": 0, "lora_alpha": -1.0, "rank_pattern": {"q_proj": 100_000}}
    with pytest.raises(grpc.RpcError) as caught:
        server.wire.publish_bytes("bad", "", image, peft_config=typed(config))
    refusal = failure(caught.value)
    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
    assert {field for field, _, _ in refusal.violations} >= {
        "peft_config.r",
        "peft_config.lora_alpha",
        "peft_config.rank_pattern.q_proj",
    }
    assert "adapter_config.json" not in refusal.message


def test_both_forms_at_once_are_refused(server: Server, zoo) -> None:
    folder = zoo.adapter("llama2", "dora")
    with pytest.raises(grpc.RpcError) as caught:
        server.wire.publish("both", folder, peft_config=adapters_pb2.PeftConfig(r=8))
    assert failure(caught.value).reason == "PUBLISH_CONFIG_TWICE"
