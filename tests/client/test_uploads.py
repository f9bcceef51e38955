"""Uploads that break, are refused or wait, and when they are tried again."""

import hashlib

import dorad
import grpc
import numpy as np
import pytest
from dorad import _retry
from dorad._retry import UploadAttempts
from fake_server import FakeServer, fail, overloaded


@pytest.mark.parametrize("source", ["folder", "tensors"])
def test_resumes_a_broken_upload(client, server, folder, source):
    server.break_uploads_at = [1, (1 << 20) + 1, 1]
    seen = []
    arguments = {"path": folder}
    if source == "tensors":
        arrays = {name: np.arange(200_000, dtype=np.float32) for name in "abcd"}
        arguments = {"tensors": arrays, "config": {}}
    version = client.publish("a", **arguments, progress=lambda *at: seen.append(at))
    image = server.images["a", 1][1]
    assert version.version == 1 and version.digest == hashlib.sha256(image).hexdigest()
    # No byte was sent twice.
    assert sum(server.chunk_sizes) == len(image)
    assert seen[-1] == (len(image), len(image))
    assert len({begin.upload_id for begin in server.publish_begins}) == 1
    assert len(server.publish_begins) == 4


def test_each_publish_has_an_upload_id_of_its_own(client, server, folder):
    client.publish("a", path=folder)
    client.publish("a", path=folder)
    assert len({begin.upload_id for begin in server.publish_begins}) == 2


def test_a_lost_answer_does_not_publish_twice(client, server, folder):
    server.lose_answers = 2
    assert client.publish("a", path=folder).version == 1
    assert [v.label for v in client.adapters()] == ["a@1"]
    assert len(server.publish_begins) == 3


def test_gives_up_when_nothing_comes_through(client, server, folder, monkeypatch):
    monkeypatch.setattr(_retry, "_FIRST_DELAY", 0.001)
    server.lose_answers = 1000
    with pytest.raises(dorad.Unavailable):
        client.publish("a", path=folder)
    # The first failure was progress: all bytes had come.
    assert len(server.publish_begins) <= UploadAttempts.MAX_FAILURES + 1


class Refusing(FakeServer):
    """Refuses uploads: at their begin, or all of them when they are complete."""

    def __init__(self, *begins, commits=None):
        super().__init__()
        self.begins, self.commits, self.bytes = list(begins), commits, 0

    def Publish(self, request_iterator, context):
        if self.begins:
            next(request_iterator)
            self.begins.pop(0)(context)
        return super().Publish(request_iterator, context)

    def add(self, context, begin, image):
        if self.commits is not None:
            self.bytes += len(image)
            del self.uploads[begin.upload_id]
            self.commits(context)
        return super().add(context, begin, image)


def store_unavailable(context):
    fail(context, grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE", "the disk is gone")


def test_an_upload_waits_for_a_server_that_is_full(folder):
    refusals = [overloaded(0.01)] * (2 * UploadAttempts.MAX_FAILURES)
    with Refusing(*refusals) as server, dorad.Client(server.target, timeout=20) as client:
        assert client.publish("a", path=folder).version == 1


@pytest.mark.parametrize("hint", [None, 60])
def test_an_upload_does_not_wait_for_room_in_vain(folder, hint):
    with Refusing(overloaded(hint)) as server, dorad.Client(server.target, timeout=20) as client:
        with pytest.raises(dorad.Overloaded):
            client.publish("a", path=folder)
        assert server.begins == [] and server.versions == {}


@pytest.mark.parametrize("refuse", [store_unavailable, overloaded(0.01)])
def test_an_image_that_the_server_does_not_keep_is_sent_a_few_times_only(monkeypatch, refuse):
    monkeypatch.setattr(_retry, "_FIRST_DELAY", 0.001)
    tensors = {"w": np.zeros(5 << 20, np.float32)}
    with Refusing(commits=refuse) as server, dorad.Client(server.target, timeout=60) as client:
        with pytest.raises((dorad.Unavailable, dorad.Overloaded)):
            client.publish("a", tensors=tensors, config={})
        assert 2 <= server.bytes // (20 << 20) <= 3


def test_no_retries_means_one_attempt(server, folder):
    server.break_uploads_at = [1]
    with dorad.Client(server.target, retry_for=0) as client, pytest.raises(dorad.Unavailable):
        client.publish("a", path=folder)
    assert len(server.publish_begins) == 1


def test_the_timeout_spans_all_attempts(client, server, folder, monkeypatch):
    server.lose_answers = 1000
    monkeypatch.setattr(UploadAttempts, "MAX_FAILURES", 1000)
    with pytest.raises((dorad.Unavailable, dorad.DeadlineExceeded)):
        client.publish("a", path=folder, timeout=2)
    assert 1 < len(server.publish_begins) < 1000


def test_a_refusal_is_not_tried_again(client, server, folder):
    with pytest.raises(dorad.InvalidArgument):
        client.publish("a/b", path=folder)
    assert len(server.publish_begins) == 1


def test_progress_is_whole_when_the_last_stream_had_nothing_left_to_send(client, server, folder):
    server.lose_answers = 1
    seen = []
    client.publish("a", path=folder, progress=lambda *at: seen.append(at))
    size = len(server.images["a", 1][1])
    assert seen[-1] == (size, size)
