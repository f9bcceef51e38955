"""The registry of adapter versions: list, activate, retire and watch."""

import threading

import dorad
import pytest


def test_versions_rise_and_can_be_named(client, folder):
    assert client.publish("a", path=folder).version == 1
    assert client.publish("a", path=str(folder), version=7, activate=False).version == 7
    assert client.adapter("a").version == 1 and not client.adapter("a@7").active
    with pytest.raises(dorad.Conflict) as caught:
        client.publish("a", path=folder, version=7)
    assert caught.value.code == "ALREADY_EXISTS" and caught.value.current_generation is None


def test_lists_every_page(client, server, folder):
    for _ in range(5):
        client.publish("a", path=folder)
    client.publish("b", path=folder)
    server.page_size = 2
    assert [v.label for v in client.adapters()] == ["a@1", "a@2", "a@3", "a@4", "a@5", "b@1"]
    assert [v.label for v in client.adapters("b")] == ["b@1"]


def test_a_reference_from_before_a_restart_names_no_other_version(client, server, folder):
    old = client.publish("a", path=folder)
    assert old.ref == f"a@1:{old.digest[:12]}" and client.adapter(old.ref).version == 1
    # A server without a store has restarted: its numbers begin again.
    server.versions.clear()
    server.active.clear()
    weights = folder / "adapter_model.safetensors"
    image = bytearray(weights.read_bytes())
    image[-1] ^= 1
    weights.write_bytes(image)
    new = client.publish("a", path=folder)
    assert (new.label, new.digest == old.digest) == ("a@1", False)
    calls = [
        lambda: client.retire(old.ref),
        lambda: client.activate(old.ref),
        lambda: client.adapter(old.ref),
        lambda: client.generate([1], adapter=old.ref, max_tokens=1),
        lambda: client.score([[1, 2]], adapters=[old.ref]),
    ]
    for call in calls:
        with pytest.raises(dorad.NotFound):
            call()
    assert client.adapter("a@1").digest == new.digest
    assert client.retire(new.ref).label == "a@1"


def test_activates_with_compare_and_set(client, server, folder):
    client.publish("a", path=folder)
    second = client.publish("a", path=folder, activate=False)
    done = client.activate("a@2", expected_generation=second.generation)
    assert done.adapter.active and done.previous_version == 1
    assert client.activate("a", 1).previous_version == 2
    with pytest.raises(dorad.Conflict) as caught:
        client.activate("a", 2, expected_generation=second.generation)
    assert caught.value.code == "ABORTED" and caught.value.reason == "GENERATION_MOVED"
    assert caught.value.current_generation == server.generation
    with pytest.raises(ValueError, match="which version of 'a'"):
        client.activate("a")


def test_retires(client, folder):
    client.publish("a", path=folder)
    gone = client.retire("a@1", force=True)
    assert gone.state == "retiring" and gone.tags["force"] == "True"
    with pytest.raises(dorad.NotFound) as caught:
        client.adapter("a@1")
    assert caught.value.reason == "ADAPTER_NOT_FOUND"


def test_watches_from_a_generation(client, folder):
    client.publish("a", path=folder)
    client.publish("b", path=folder, activate=False)
    with client.watch(0) as events:
        got = [next(events) for _ in range(3)]
    assert [(e.generation, e.type, e.adapter.label) for e in got] == [
        (1, "published", "a@1"),
        (2, "activated", "a@1"),
        (3, "published", "b@1"),
    ]
    with pytest.raises(dorad.InvalidArgument) as caught:
        next(client.watch(-1))
    assert caught.value.code == "OUT_OF_RANGE"


def test_closing_a_watch_from_another_thread_ends_it(client):
    events = client.watch()
    timer = threading.Timer(0.1, events.close)
    timer.start()
    assert list(events) == []
    timer.join()
