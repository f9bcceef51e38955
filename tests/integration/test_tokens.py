"""Tokens, roles and tenants: what each caller may do, and that tenants do not meet."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dorad
import grpc
import pytest
from dorad.v1 import adapters_pb2, control_pb2, inference_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from lib.server import serve, wait_until
from lib.tenants import PROMPT, connections, reason, serve_tenants
from lib.tokens import write_tokens
from lib.wire import Wire, failure, generate_request, publish_parts

LONG = 2000


@pytest.fixture(scope="module")
def tokens_file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tokens") / "tokens.yaml"


@pytest.fixture(scope="module")
def server(zoo, tokens_file):
    with serve_tenants(zoo, tokens_file) as running:
        yield running


@pytest.fixture
def connect(server):
    with connections(server) as connect:
        yield connect


def test_nobody_gets_in_without_a_token_of_the_file(server) -> None:
    for token, expected in ((None, "TOKEN_MISSING"), ("wrong", "TOKEN_INVALID")):
        with dorad.Client(server.grpc, token=token, retry_for=0) as client:
            for call in (client.info, client.adapters, client.wake):
                assert reason(call) == expected
            assert reason(client.generate, PROMPT, max_tokens=1) == expected
            assert reason(client.score, [PROMPT]) == expected
            assert reason(lambda c=client: next(iter(c.watch()))) == expected
    stub = health_pb2_grpc.HealthStub(server.wire.channel)
    status = stub.Check(health_pb2.HealthCheckRequest(service="readiness"), timeout=10).status
    assert status == health_pb2.HealthCheckResponse.SERVING


def test_an_upload_without_a_token_sends_nothing_in(server, zoo) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        server.wire.publish("team-a.sneaky", zoo.adapter("slow", "lora"))
    assert failure(caught.value).reason == "TOKEN_MISSING"
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_roles_open_what_they_say(connect, zoo) -> None:
    worker, publisher, boss = connect("a-worker"), connect("publisher"), connect("boss")
    folder = zoo.adapter("slow", "lora")
    assert worker.generate(PROMPT, adapter="team-a.x", max_tokens=2)
    assert worker.adapter("team-a.x").active
    for call, arguments in (
        (worker.activate, ("team-a.x@1",)),
        (worker.retire, ("team-a.x@1",)),
        (worker.pause, ()),
        (worker.resume, ()),
        (worker.sleep, ()),
        (worker.wake, ()),
        (publisher.pause, ()),
        (publisher.resume, ()),
        (publisher.sleep, ()),
        (publisher.generate, (PROMPT,)),
        (publisher.score, ([PROMPT],)),
        (publisher.abort, ("r",)),
    ):
        assert reason(call, *arguments) == "ROLE_MISSING", call
    assert reason(worker.publish, "team-a.y", path=folder) == "ROLE_MISSING"
    version = publisher.publish("team-a.y", path=folder, activate=True)
    assert publisher.activate(version.ref).generation > 0
    publisher.pause(adapter="team-a.y")
    publisher.resume("team-a.y")
    publisher.retire(version.ref)
    boss.pause()
    boss.resume()
    assert boss.generate(PROMPT, adapter="team-b.x", max_tokens=2)


def test_tenants_use_see_and_change_their_own_adapters_only(connect, zoo) -> None:
    trainer, worker = connect("b-trainer"), connect("b-worker")
    folder = zoo.adapter("slow", "lora")
    theirs = "team-a.x"
    for call, arguments in (
        (trainer.activate, (f"{theirs}@1",)),
        (trainer.retire, (f"{theirs}@1",)),
        (trainer.adapter, (theirs,)),
        (trainer.adapters, (theirs,)),
        (worker.adapter, (theirs,)),
    ):
        assert reason(call, *arguments) == "ADAPTER_NOT_ALLOWED", call
    assert reason(trainer.publish, theirs, path=folder) == "ADAPTER_NOT_ALLOWED"
    assert reason(trainer.publish, "team-b", path=folder) == "ADAPTER_NOT_ALLOWED"
    assert reason(trainer.pause, adapter=theirs) == "ADAPTER_NOT_ALLOWED"
    assert reason(trainer.resume, theirs) == "ADAPTER_NOT_ALLOWED"
    assert reason(worker.generate, PROMPT, adapter=theirs) == "ADAPTER_NOT_ALLOWED"
    assert reason(worker.score, [PROMPT], ["team-b.x", theirs]) == "ADAPTER_NOT_ALLOWED"
    assert reason(worker.abort, adapter=theirs) == "ADAPTER_NOT_ALLOWED"
    # The base model is everybody's.
    assert worker.generate(PROMPT, max_tokens=2)
    assert {item.name for item in worker.adapters()} == {"team-b.x"}
    names = {item.name for item in connect("boss").adapters()}
    assert names >= {"team-a.x", "team-b.x"}


def test_an_unknown_name_is_not_answered_with_others_names(connect, zoo) -> None:
    theirs = connect("a-trainer").publish("team-a.distilled", path=zoo.adapter("slow", "dora"))
    with pytest.raises(dorad.NotFound) as mine:
        connect("b-worker").adapter("team-b.xx")
    assert mine.value.metadata["nearest"] == "team-b.x"
    with pytest.raises(dorad.NotFound) as near:
        connect("b-worker").adapter("team-b.distilled")
    with pytest.raises(dorad.NotFound) as far:
        connect("b-worker").adapter("team-b.nothing-is-like-this")
    # Not even the wording tells that there is one.
    for error in (near.value, far.value):
        asked = error.metadata["adapter"]
        assert error.message == f'there is no adapter named "{asked}"'
        assert set(error.metadata) == set(far.value.metadata)
    connect("a-trainer").retire(theirs.ref)


def test_pages_of_a_list_hold_only_what_the_caller_may_see(server, connect, zoo) -> None:
    boss, folder = connect("boss"), zoo.adapter("slow", "lora")
    refs = [boss.publish(name, path=folder).ref for name in ("team-0.y", "team-b.y", "zz.y")]
    stub = Wire(server.grpc)
    metadata = (("authorization", "Bearer b-worker-token"),)
    names, token = [], ""
    while True:
        request = adapters_pb2.ListRequest(page_size=1, page_token=token)
        page = stub.adapters.List(request, timeout=20, metadata=metadata)
        names += [item.name for item in page.adapters]
        token = page.next_page_token
        if not token:
            break
    stub.close()
    assert names == ["team-b.x", "team-b.y"]
    for ref in refs:
        boss.retire(ref)


def test_watchers_learn_of_their_own_adapters_only(connect, zoo) -> None:
    boss, folder = connect("boss"), zoo.adapter("slow", "lora")
    generation = boss.info().generation
    for name in ("team-a.w", "team-b.w", "team-a.w"):
        boss.publish(name, path=folder)
    with connect("b-worker").watch(generation) as events:
        assert next(iter(events)).adapter.name == "team-b.w"
    with connect("a-worker").watch(generation) as events:
        seen = [next(iter(events)).adapter for _ in range(2)]
    assert [item.name for item in seen] == ["team-a.w"] * 2
    for ref in ("team-a.w@1", "team-a.w@2", "team-b.w@1"):
        boss.retire(ref)


def test_callers_on_one_connection_are_never_taken_for_one_another(server) -> None:
    """As behind a proxy: one HTTP/2 connection, calls of many at the same time."""
    wire = Wire(server.grpc)
    expected = {
        "a-worker": ({"team-a.x"}, "team-a.x"),
        "b-worker": ({"team-b.x"}, "team-b.x"),
        "nobody": (None, None),
    }

    def one(number: int) -> None:
        name = list(expected)[number % 3]
        names, adapter = expected[name]
        metadata = (("authorization", f"Bearer {name}-token"),)
        try:
            page = wire.adapters.List(adapters_pb2.ListRequest(), timeout=60, metadata=metadata)
            assert {item.name for item in page.adapters if item.name.endswith(".x")} == names
        except grpc.RpcError as error:
            assert names is None and error.code() == grpc.StatusCode.UNAUTHENTICATED, name
        for wanted in ("team-a.x", "team-b.x"):
            call = wire.inference.Generate(
                generate_request(PROMPT, adapter=wanted, max_tokens=2),
                timeout=60,
                metadata=metadata,
            )
            try:
                assert list(call) and wanted == adapter, (name, wanted)
            except grpc.RpcError as error:
                assert wanted != adapter, (name, failure(error))

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(one, range(120)))
    wire.close()


def test_tenants_share_no_prefixes(connect) -> None:
    prompt = list(range(100, 228))

    def cached(name: str, **options) -> int:
        (sample,) = connect(name).generate(prompt, max_tokens=1, **options)
        return sample.usage.cached_prompt_tokens

    assert cached("a-worker") == 0
    assert cached("a-worker") > 0
    assert cached("a-trainer") > 0, "one tenant"
    assert cached("b-worker") == 0
    assert cached("b-worker", cache_salt="team-a") == 0
    assert cached("boss") == 0


def test_requests_of_others_cannot_be_ended_or_named(connect, server) -> None:
    mine, theirs = connect("a-worker"), connect("b-worker")
    assert theirs.abort(all=True) == 0
    with mine.stream(PROMPT, max_tokens=LONG, ignore_eos=True, request_id="same") as stream:
        next(iter(stream))
        assert theirs.abort("same") == 0
        assert theirs.abort(all=True) == 0
        # The id is free for another tenant.
        assert theirs.generate(PROMPT, max_tokens=1, request_id="same")
        assert next(iter(stream)).finish is None, "it goes on"
    with mine.stream(PROMPT, max_tokens=LONG, ignore_eos=True, request_id="mine") as stream:
        next(iter(stream))
        assert mine.abort("mine") == 1
    with mine.stream(PROMPT, max_tokens=LONG, ignore_eos=True) as stream:
        next(iter(stream))
        assert connect("boss").abort(all=True) == 1


def test_uploads_of_others_cannot_be_found_or_resumed(server, zoo) -> None:
    wire = Wire(server.grpc)
    begin = adapters_pb2.PublishBegin(
        name="team-a.up", adapter_config_json="{}", safetensors_size=5, upload_id="same"
    )
    parts = [
        adapters_pb2.PublishRequest(begin=begin),
        adapters_pb2.PublishRequest(chunk=adapters_pb2.PublishChunk(offset=0, data=b"abc")),
    ]
    mine = (("authorization", "Bearer a-trainer-token"),)
    theirs = (("authorization", "Bearer b-trainer-token"),)
    with pytest.raises(grpc.RpcError) as caught:
        wire.adapters.Publish(iter(parts), timeout=20, metadata=mine)
    assert failure(caught.value).reason == "PUBLISH_INCOMPLETE"
    request = adapters_pb2.GetUploadRequest(upload_id="same")
    assert wire.adapters.GetUpload(request, timeout=20, metadata=mine).received_bytes == 3
    with pytest.raises(grpc.RpcError) as caught:
        wire.adapters.GetUpload(request, timeout=20, metadata=theirs)
    assert failure(caught.value).reason == "UPLOAD_NOT_FOUND"
    # Another Begin under the same id is another upload, not UPLOAD_BEGIN_DIFFERS.
    begin.name = "team-b.up"
    other = adapters_pb2.PublishRequest(begin=begin)
    with pytest.raises(grpc.RpcError) as caught:
        wire.adapters.Publish(iter([other]), timeout=20, metadata=theirs)
    assert failure(caught.value).reason == "PUBLISH_INCOMPLETE"
    assert wire.adapters.GetUpload(request, timeout=20, metadata=mine).received_bytes == 3
    wire.close()


def test_a_changed_file_counts_without_a_restart_and_a_broken_one_does_not(zoo, tmp_path) -> None:
    path = tmp_path / "tokens.yaml"
    write_tokens(path, {"old": ("t", ["infer"]), "stays": ("t", ["infer"])}, {})
    failures = "dorad_tokens_reload_failures_total"
    with serve(zoo.model("llama2"), settings={"security.tokens_file": path}) as server:

        def who(name: str) -> str:
            with dorad.Client(server.grpc, token=f"{name}-token", retry_for=0) as client:
                return reason(client.info)

        stop, seen = threading.Event(), []

        def traffic() -> None:
            with dorad.Client(server.grpc, token="stays-token", retry_for=0) as client:
                while not stop.wait(0.005):
                    seen.append(reason(client.generate, PROMPT, max_tokens=2))

        thread = threading.Thread(target=traffic)
        thread.start()
        assert (who("old"), who("new")) == ("", "TOKEN_INVALID")
        write_tokens(path, {"new": ("t", ["infer"]), "stays": ("t", ["infer"])}, {})
        wait_until(lambda: who("new") == "", 20, "the new token")
        assert who("old") == "TOKEN_INVALID"
        for number, text in enumerate(("tokens: [", "tokens: [{name: x}]\n"), start=1):
            path.write_text(text)
            wait_until(lambda n=number: server.metric(failures) == n, 20, "the failure")
            assert who("new") == ""
        stop.set()
        thread.join()
        assert seen and set(seen) == {""}
        for line in server.log().splitlines():
            assert "-token" not in line, "a token in the log"


def test_calls_do_not_outlive_their_callers_rights(zoo, tmp_path) -> None:
    """A Watch ends with its token, or when it may see other things; an upload is not committed."""
    path = tmp_path / "tokens.yaml"
    watcher, stays = ("t", ["infer"]), ("t", ["infer", "publish"])
    write_tokens(path, {"gone": watcher, "moved": watcher, "stays": stays, "up": stays}, {})
    folder = zoo.adapter("slow", "dora")
    config = (folder / "adapter_config.json").read_text()
    weights = (folder / "adapter_model.safetensors").read_bytes()
    ends: dict[str, str] = {}
    with serve(zoo.model("slow"), settings={"security.tokens_file": path}) as server:

        def watch(name: str) -> None:
            with dorad.Client(server.grpc, token=f"{name}-token") as client:
                ends[name] = reason(lambda: list(client.watch(0)))

        names = ("gone", "moved", "stays")
        threads = {name: threading.Thread(target=watch, args=(name,)) for name in names}
        for thread in threads.values():
            thread.start()
        has_changed = threading.Event()
        begin = adapters_pb2.PublishBegin(
            name="late", adapter_config_json=config, safetensors_size=len(weights)
        )
        *parts, commit = publish_parts(begin, weights)

        def upload():
            yield from parts
            has_changed.wait(30)
            yield commit

        wire = Wire(server.grpc)
        call = wire.adapters.Publish.future(
            upload(), metadata=[("authorization", "Bearer up-token")], timeout=60
        )
        watches = 'dorad_rpc_started_total{method="Watch"}'
        wait_until(lambda: server.metrics().get(watches) == 3, what="the watches to begin")
        time.sleep(0.5)
        assert not ends
        tokens = {"moved": ("t", ["infer", "publish"]), "stays": stays}
        write_tokens(path, tokens, {})
        threads["gone"].join(20)
        threads["moved"].join(20)
        assert ends == {"gone": "TOKEN_INVALID", "moved": "RIGHTS_CHANGED"}
        has_changed.set()
        with pytest.raises(grpc.RpcError) as refused:
            call.result()
        assert failure(refused.value).reason == "TOKEN_INVALID"
        with dorad.Client(server.grpc, token="stays-token") as client:
            assert reason(client.adapter, "late") == "ADAPTER_NOT_FOUND"
            client.publish("kept", path=folder)
            assert "stays" not in ends
            # Its watch goes on, and ends with the server.
        wire.close()
        assert server.stop() == 0
    threads["stays"].join(20)
    assert not threads["stays"].is_alive()


def answers(channel: grpc.Channel, method: str, request: bytes) -> bool:
    call = channel.stream_stream(method, bytes, bytes)
    try:
        return len(list(call(iter([request]), timeout=10))) == 1
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED
        return False


def test_grpcs_own_services_which_ask_nobody_are_left_to_the_admin_listener(
    zoo, server, tokens_file, tmp_path
) -> None:
    asked = {
        "/grpc.channelz.v1.Channelz/GetServers": b"",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": b"\x3a\x00",  # A list.
    }
    for method, request in asked.items():
        assert not answers(server.wire.channel, method, request)
    admin = f"unix:{tmp_path}/admin.sock"
    settings = {"security.tokens_file": tokens_file, "server.admin_listen": admin}
    model = zoo.model("llama2")
    with serve(model, settings=settings) as other, grpc.insecure_channel(admin) as channel:
        for method, request in asked.items():
            assert not answers(other.wire.channel, method, request)
            assert answers(channel, method, request)


def test_fields_are_bounded_before_they_are_used(connect, server) -> None:
    wire = Wire(server.grpc)
    metadata = (("authorization", "Bearer boss-token"),)

    def refused(call, request) -> str:
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=30, metadata=metadata)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        return failure(caught.value).reason

    big = "x" * (900 << 10)
    ids = inference_pb2.RequestIds(request_ids=[big])
    assert refused(wire.inference.Abort, inference_pb2.AbortRequest(requests=ids)) == (
        "ABORT_TARGET_INVALID"
    )
    page = adapters_pb2.ListRequest(page_token=big)
    assert refused(wire.adapters.List, page) == "PAGE_TOKEN_INVALID"
    path = adapters_pb2.PublishFromPathRequest(name="x", path=big)
    assert refused(wire.adapters.PublishFromPath, path) == "PATH_TOO_LONG"
    tags = control_pb2.SleepRequest(tags=["weights"] * 100_000)
    assert refused(wire.control.Sleep, tags) == "SLEEP_TAG_INVALID"
    tags = control_pb2.WakeRequest(tags=[big])
    assert refused(wire.control.Wake, tags) == "SLEEP_TAG_INVALID"
    begin = adapters_pb2.PublishBegin(name="x", safetensors_size=5)
    begin.peft_config.r = 1
    begin.peft_config.target_modules.list.names.extend(["m" * 20] * 100_000)
    part = iter([adapters_pb2.PublishRequest(begin=begin)])
    assert refused(wire.adapters.Publish, part) == "PUBLISH_CONFIG_SIZE"
    wire.close()
