"""The life of adapter versions over the wire: publish, activate, retire, list, watch."""

import hashlib
import itertools
import threading

import grpc
import pytest
from dorad.v1 import adapters_pb2, control_pb2, inference_pb2, types_pb2
from lib.server import Server, device, serve, wait_until
from lib.wire import ABORTED, LENGTH, collect, failure, publish_parts

PROMPT = [11, 12, 13, 14, 15]


@pytest.fixture
def server(zoo):
    roots = f"[{zoo.directory}]"
    with serve(zoo.model("slow"), None, {"adapters.allowed_roots": roots}) as running:
        yield running


def generation(server: Server) -> int:
    return server.wire.info().generation


def refused(call, *args, **kwargs):
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, **kwargs)
    return failure(caught.value)


def answer(server: Server, adapter: str) -> list[int]:
    options = dict(temperature=0.0, max_tokens=8, ignore_eos=True)
    return server.wire.generate(PROMPT, adapter=adapter, **options)[0].tokens


def test_versions_rise_and_the_active_one_serves(server: Server, zoo) -> None:
    first = server.wire.publish("x", zoo.adapter("slow", "dora", 0), activate=True)
    second = server.wire.publish("x", zoo.adapter("slow", "dora", 1))
    assert (first.adapter.version, second.adapter.version) == (1, 2)
    assert first.adapter.active and not second.adapter.active
    assert first.adapter.digest != second.adapter.digest
    assert second.generation > first.generation
    one, two = answer(server, "x@1"), answer(server, "x@2")
    assert answer(server, "x") == one != two
    moved = server.wire.activate("x", 2)
    assert moved.previous_version == 1 and moved.adapter.active
    assert answer(server, "x") == two and answer(server, "x@1") == one


def test_path_and_upload_give_one_digest(server: Server, zoo) -> None:
    folder = zoo.adapter("slow", "dora_everything")
    uploaded = server.wire.publish("up", folder).adapter
    read = server.wire.publish_path("path", folder).adapter
    assert uploaded.digest == read.digest
    assert uploaded.kind == types_pb2.ADAPTER_KIND_DORA
    assert (uploaded.min_rank, uploaded.max_rank) == (6, 6)
    assert uploaded.num_modules == 6 * 7 + 2
    bytes_each = 4 if device() == "cpu" else 2
    assert uploaded.resident_bytes >= bytes_each * uploaded.num_parameters > 0
    assert uploaded.timing.norms.ToNanoseconds() > 0
    assert answer(server, "up@1") == answer(server, "path@1") != answer(server, "")


def test_explicit_versions_must_rise(server: Server, zoo) -> None:
    folder = zoo.adapter("slow", "lora")
    assert server.wire.publish("v", folder, version=7).adapter.version == 7
    assert server.wire.publish("v", folder).adapter.version == 8
    refusal = refused(server.wire.publish, "v", folder, version=8)
    assert refusal.code == grpc.StatusCode.ABORTED and refusal.reason == "ADAPTER_VERSION_TAKEN"


def test_expected_generation_is_compared(server: Server, zoo) -> None:
    folder = zoo.adapter("slow", "lora")
    server.wire.publish("g", folder, activate=True)
    server.wire.publish("g", folder)
    now = generation(server)
    refusal = refused(server.wire.activate, "g", 2, now - 1)
    assert refusal.code == grpc.StatusCode.ABORTED and refusal.reason == "GENERATION_MISMATCH"
    assert refusal.metadata["current_generation"] == str(now) and str(now) in refusal.message
    assert server.wire.adapter("g").version == 1
    assert server.wire.activate("g", 2, now).generation > now
    refusal = refused(server.wire.publish, "g", folder, activate=True, expected_generation=now)
    assert refusal.reason == "GENERATION_MISMATCH"
    assert server.wire.adapter("g").version == 2


def test_only_one_of_many_racing_activations_wins(server: Server, zoo) -> None:
    folder = zoo.adapter("slow", "lora")
    for _ in range(8):
        server.wire.publish("race", folder)
    now, wins, losses = generation(server), [], []

    def run(version: int) -> None:
        try:
            server.wire.activate("race", version, now)
            wins.append(version)
        except grpc.RpcError as error:
            losses.append(failure(error).reason)

    threads = [threading.Thread(target=run, args=(version,)) for version in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(wins) == 1 and set(losses) == {"GENERATION_MISMATCH"}
    assert server.wire.adapter("race").version == wins[0]


def test_retired_version_serves_its_holders_and_nobody_else(server: Server, zoo) -> None:
    before = server.wire.info().memory_bytes["adapters"]
    server.wire.publish("r", zoo.adapter("slow", "dora"), activate=True)
    call = server.wire.stream(PROMPT, adapter="r", max_tokens=1000, ignore_eos=True)
    messages = [next(call)]
    assert server.wire.adapter("r@1").leases == 1
    retired = server.wire.retire("r", 1).adapter
    assert retired.state == types_pb2.ADAPTER_STATE_RETIRING and not retired.active
    assert refused(server.wire.generate, PROMPT, adapter="r@1").reason == "ADAPTER_NOT_READY"
    named = refused(server.wire.generate, PROMPT, adapter="r")
    assert named.code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)
    assert server.wire.info().memory_bytes["adapters"] > before
    (sample,) = collect([*messages, *call]).values()
    assert sample.reason == LENGTH and sample.spans[0][:2] == ("r", 1)
    wait_until(
        lambda: server.wire.info().memory_bytes["adapters"] == before, what="its memory freed"
    )
    assert server.wire.adapter("r@1").state == types_pb2.ADAPTER_STATE_GONE


def test_forced_retire_ends_its_holders(server: Server, zoo) -> None:
    server.wire.publish("f", zoo.adapter("slow", "dora"), activate=True)
    server.wire.publish("other", zoo.adapter("slow", "lora"), activate=True)
    options = dict(ignore_eos=True)
    held = server.wire.stream(PROMPT, adapter="f", max_tokens=4000, **options)
    other = server.wire.stream(PROMPT, adapter="other", max_tokens=80, **options)
    messages = [next(held)]
    server.wire.retire("f", 1, force=True)
    assert collect([*messages, *held])[0].reason == ABORTED
    assert collect(other)[0].reason == LENGTH


def test_unknown_names_and_versions(server: Server, zoo) -> None:
    server.wire.publish("known", zoo.adapter("slow", "lora"))
    for ref, reason in [
        ("unknown", "ADAPTER_NOT_FOUND"),
        ("known@9", "ADAPTER_NOT_FOUND"),
        ("known", "ADAPTER_NO_ACTIVE_VERSION"),
    ]:
        refusal = refused(server.wire.generate, PROMPT, adapter=ref)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, reason)
        assert ref.partition("@")[0] in refusal.message
    assert refused(server.wire.activate, "known", 5).reason == "ADAPTER_NOT_FOUND"
    assert refused(server.wire.retire, "nobody", 1).reason == "ADAPTER_NOT_FOUND"


def test_refusals_name_what_there_is(server: Server, zoo) -> None:
    folder = zoo.adapter("slow", "lora_head")
    for _ in range(3):
        server.wire.publish("policy", folder)
    server.wire.retire("policy", 2)
    slip = refused(server.wire.generate, PROMPT, adapter="polcy")
    assert "did you mean policy?" in slip.message and slip.metadata["nearest"] == "policy"
    version = refused(server.wire.generate, PROMPT, adapter="policy@9")
    assert version.metadata["ready_versions"] == "1,3" and "1, 3" in version.message
    inactive = refused(server.wire.generate, PROMPT, adapter="policy")
    assert inactive.metadata["ready_versions"] == "1,3"


def test_a_version_that_cannot_serve_says_why(server: Server, zoo) -> None:
    folder = zoo.adapter("slow", "lora_head")
    refused(server.wire.publish, "y", zoo.adapter("llama2", "lora"))
    for failed in (
        refused(server.wire.generate, PROMPT, adapter="y@1"),
        refused(server.wire.score, [PROMPT], ["y@1"]),
        refused(server.wire.activate, "y", 1),
    ):
        assert failed.reason == "ADAPTER_NOT_READY" and "failed to load" in failed.message
        assert failed.metadata["state"] == "failed"
        assert failed.metadata["failure_reason"] in failed.message
    server.wire.publish("y", folder)
    server.wire.retire("y", 2)
    gone = refused(server.wire.generate, PROMPT, adapter="y@2")
    assert "has been retired" in gone.message and gone.metadata["state"] == "gone"


def states(server: Server, name: str) -> dict[int, str]:
    prefix = len("ADAPTER_STATE_")
    return {
        item.version: types_pb2.AdapterState.Name(item.state)[prefix:].lower()
        for item in server.wire.list_adapters(name)
    }


@pytest.mark.parametrize("how", ["publish", "publish_path"])
def test_keep_last_retires_older_versions_but_not_the_active_one(
    server: Server, zoo, how: str
) -> None:
    folder, name = zoo.adapter("slow", "lora_head"), how.replace("_", "-")
    publish = getattr(server.wire, how)
    publish(name, folder, activate=True)
    for _ in range(3):
        publish(name, folder)
    assert set(states(server, name).values()) == {"ready"}
    publish(name, folder, keep_last=2)
    assert states(server, name) == {1: "ready", 2: "gone", 3: "gone", 4: "ready", 5: "ready"}
    assert server.wire.adapter(name).version == 1
    publish(name, folder, keep_last=2, activate=True)
    assert [v for v, state in states(server, name).items() if state == "ready"] == [5, 6]


def test_keep_last_waits_for_who_holds_a_version(server: Server, zoo) -> None:
    folder = zoo.adapter("slow", "lora_head")
    server.wire.publish("held", folder)
    call = server.wire.stream(PROMPT, adapter="held@1", max_tokens=150, ignore_eos=True)
    messages = [next(call)]
    server.wire.pause()  # or it might end before the publish does
    server.wire.publish("held", folder, keep_last=1)
    assert states(server, "held") == {1: "retiring", 2: "ready"}
    server.wire.resume()
    (sample,) = collect([*messages, *call]).values()
    assert sample.reason == LENGTH
    wait_until(lambda: states(server, "held")[1] == "gone", what="the version to go")


def test_a_refused_publish_retires_nothing(server: Server, zoo) -> None:
    folder = zoo.adapter("slow", "lora_head")
    server.wire.publish("whole", folder)
    server.wire.publish("whole", folder)
    refused(server.wire.publish, "whole", zoo.adapter("llama2", "lora"), keep_last=1)
    assert states(server, "whole") == {1: "ready", 2: "ready", 3: "failed"}


def test_keep_last_of_the_server_can_be_overruled(zoo) -> None:
    folder = zoo.adapter("slow", "lora_head")
    with serve(zoo.model("slow"), None, {"adapters.keep_last": 1}) as server:
        server.wire.publish("k", folder)
        server.wire.publish("k", folder, keep_last=0)
        assert states(server, "k") == {1: "ready", 2: "ready"}
        server.wire.publish("k", folder)
        assert states(server, "k") == {1: "gone", 2: "gone", 3: "ready"}


def test_list_pages_in_order(server: Server, zoo) -> None:
    folder = zoo.adapter("slow", "lora_head")
    for name in ("b", "a", "c"):
        for _ in range(3):
            server.wire.publish(name, folder)
    expected = [(name, version) for name in "abc" for version in (1, 2, 3)]
    for page_size in (None, 1, 2, 4, 9):
        listed = server.wire.list_adapters(page_size=page_size)
        assert [(item.name, item.version) for item in listed] == expected
    assert [item.version for item in server.wire.list_adapters("b")] == [1, 2, 3]


def test_tags_are_kept(server: Server, zoo) -> None:
    folder = zoo.adapter("slow", "lora_head")
    server.wire.publish("tagged", folder, tags={"step": "12", "run": "grpo"})
    assert dict(server.wire.adapter("tagged@1").tags) == {"step": "12", "run": "grpo"}


def test_watch_tells_everything_in_order(server: Server, zoo) -> None:
    folder = zoo.adapter("slow", "lora_head")
    call = server.wire.adapters.Watch(
        adapters_pb2.WatchRequest(from_generation=generation(server)), timeout=30
    )
    server.wire.publish("w", folder)
    server.wire.activate("w", 1)
    refused(server.wire.publish, "w", zoo.adapter("llama2", "lora"))
    server.wire.retire("w", 1)
    events = []
    for event in call:
        events.append(event)
        if event.type == adapters_pb2.WATCH_EVENT_TYPE_GONE:
            break
    call.cancel()
    kinds = [
        adapters_pb2.WatchEventType.Name(event.type)[len("WATCH_EVENT_TYPE_") :] for event in events
    ]
    assert kinds == ["PUBLISHED", "ACTIVATED", "FAILED", "RETIRED", "GONE"]
    generations = [event.generation for event in events]
    assert generations == sorted(set(generations))
    for seen, following in itertools.pairwise(events):
        replay = server.wire.adapters.Watch(
            adapters_pb2.WatchRequest(from_generation=seen.generation), timeout=30
        )
        assert next(replay) == following
        replay.cancel()


def test_a_watch_resumes_between_a_publish_and_its_activation(server: Server, zoo) -> None:
    before = generation(server)
    server.wire.publish("between", zoo.adapter("slow", "lora_head"), activate=True)
    types = []
    for _ in range(2):  # each event by a watch of its own
        request = adapters_pb2.WatchRequest(from_generation=before)
        call = server.wire.adapters.Watch(request, timeout=30)
        event = next(call)
        call.cancel()
        types.append(event.type)
        before = event.generation
    assert types == [
        adapters_pb2.WATCH_EVENT_TYPE_PUBLISHED,
        adapters_pb2.WATCH_EVENT_TYPE_ACTIVATED,
    ]


def test_a_misspelt_adapter_is_neither_paused_nor_aborted(server: Server, zoo) -> None:
    server.wire.publish("policy", zoo.adapter("slow", "lora_head"), activate=True)
    for request, call in (
        (control_pb2.PauseRequest(adapter="polcy"), server.wire.control.Pause),
        (control_pb2.PauseRequest(adapter="policy@7"), server.wire.control.Pause),
        (inference_pb2.AbortRequest(adapter="polcy"), server.wire.inference.Abort),
    ):
        refusal = refused(call, request)
        assert refusal.reason == "ADAPTER_NOT_FOUND"
        request.allow_missing = True
        call(request, timeout=10)
    assert sorted(server.wire.info().engine.paused_adapters) == ["polcy", "policy@7"]
    for name in ("polcy", "policy@7"):
        server.wire.control.Resume(control_pb2.ResumeRequest(adapter=name), timeout=10)


def test_an_expected_generation_needs_an_activation(server: Server, zoo) -> None:
    folder = zoo.adapter("slow", "lora_head")
    expected = generation(server)
    refusal = refused(
        server.wire.publish, "guarded", folder, activate=False, expected_generation=expected
    )
    assert refusal.reason == "EXPECTED_GENERATION_WITHOUT_ACTIVATE"
    server.wire.publish("guarded", folder, activate=True, expected_generation=generation(server))


def test_upload_must_be_whole_and_intact(server: Server, zoo) -> None:
    folder = zoo.adapter("slow", "lora_head")
    image = (folder / "adapter_model.safetensors").read_bytes()
    config = (folder / "adapter_config.json").read_text()
    digest = hashlib.sha256(image).digest()

    def upload(parts):
        return refused(lambda: server.wire.adapters.Publish(iter(parts), timeout=30))

    begin = adapters_pb2.PublishBegin(
        name="u",
        adapter_config_json=config,
        safetensors_size=len(image),
        safetensors_sha256=digest,
    )
    whole = list(publish_parts(begin, image))
    wrong_hash = adapters_pb2.PublishBegin()
    wrong_hash.CopyFrom(begin)
    wrong_hash.safetensors_sha256 = bytes(32)
    cases = {
        "no begin": whole[1:],
        "no commit": whole[:-1],
        "no chunk": [whole[0], whole[-1]],
        "two begins": [whole[0], *whole],
        "gap": [
            whole[0],
            adapters_pb2.PublishRequest(chunk=adapters_pb2.PublishChunk(offset=5, data=image[5:])),
            whole[-1],
        ],
        "too much": [
            *whole[:-1],
            adapters_pb2.PublishRequest(
                chunk=adapters_pb2.PublishChunk(offset=len(image), data=b"x")
            ),
            whole[-1],
        ],
        "wrong hash": [adapters_pb2.PublishRequest(begin=wrong_hash), *whole[1:]],
        "empty": [],
    }
    for name, parts in cases.items():
        refusal = upload(parts)
        assert refusal.code in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.DATA_LOSS,
        ), (name, refusal)
        assert refusal.reason, name
    assert server.wire.adapters.Publish(iter(whole), timeout=30).adapter.name == "u"
    assert all(
        item.state in (types_pb2.ADAPTER_STATE_READY, types_pb2.ADAPTER_STATE_FAILED)
        for item in server.wire.list_adapters()
    )
