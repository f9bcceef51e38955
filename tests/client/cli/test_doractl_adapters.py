"""doractl adapters."""

import json
import re

import dorad
import yaml
from dorad.cli.app import app
from dorad.v1 import types_pb2
from typer.testing import CliRunner


def test_durable_versions_are_shown(doractl, folder):
    out = doractl("adapters", "publish", "a", folder, "--durable")
    assert re.search(r"durable +yes", out)
    doractl("adapters", "publish", "a", folder, "--no-activate")
    assert re.search(r"durable +no", doractl("adapters", "show", "a@2"))
    header, *rows = [line.split() for line in doractl("adapters", "list").splitlines()]
    assert header[2:4] == ["ACTIVE", "DURABLE"] and rows[0][2:4] == ["yes", "yes"]
    assert "yes" not in rows[1]


def test_adapters_life(doractl, server, folder):
    out = doractl("adapters", "publish", "a", folder, "--tag", "step=3", "--tag", "note=[red]x[/x]")
    assert "a@1 (active)" in out and "note=[red]x[/x], step=3" in out
    published = json.loads(
        doractl("adapters", "publish", "a", folder, "--no-activate", "--keep-last", 2, "-o", "json")
    )
    assert server.publish_begins[-1].keep_last == 2
    assert published["version"] == 2 and not published["active"] and not published["durable"]
    assert doractl("adapters", "activate", "a@2").startswith("a@2 is active (before: version 1")
    rows = doractl("adapters", "list").splitlines()
    assert rows[0].split()[:3] == ["NAME", "VERSION", "ACTIVE"] and len(rows) == 3
    assert "4-16" in rows[1] and "yes" in rows[2]
    assert "norms 0.250" in doractl("adapters", "show", "a@1")
    assert "step=3" in doractl("adapters", "show", "a@1")
    assert doractl("adapters", "retire", "a@1", "--force").startswith("a@1 is retiring")
    error = doractl("adapters", "show", "a@1", code=1)
    assert "NOT_FOUND (ADAPTER_NOT_FOUND)" in error
    doractl("adapters", "publish", "b", "/on/server", "--server-side")
    assert server.images["b", 1][1] == b"/on/server"


def test_rolls_back_to_the_newest_ready_version_below_the_active_one(doractl, server, folder):
    for _ in range(4):
        doractl("adapters", "publish", "a", folder)
    server.versions["a", 3].state = types_pb2.ADAPTER_STATE_FAILED
    assert doractl("adapters", "rollback", "a").startswith("a@2 is active (before: version 4")
    done = json.loads(doractl("adapters", "rollback", "a", "-o", "json"))
    assert done["adapter"]["version"] == 1 and done["previous_version"] == 2
    assert "below the active one (1)" in doractl("adapters", "rollback", "a", code=1)
    assert doractl("adapters", "rollback", "a", "--to", "4").startswith("a@4 is active")
    assert "no adapter a@9" in doractl("adapters", "rollback", "a", "--to", "9", code=1)
    assert server.active == {"a": 4}
    assert "no adapter named 'b'" in doractl("adapters", "rollback", "b", code=1)
    doractl("adapters", "publish", "c", folder, "--no-activate")
    assert "no active version" in doractl("adapters", "rollback", "c", code=1)


def test_a_rollback_that_is_overtaken_fails(doractl, server, folder, monkeypatch):
    for _ in range(2):
        doractl("adapters", "publish", "a", folder)
    listing = dorad.Client.adapters

    def list_and_move(client, name):
        versions = listing(client, name)
        client.activate(name, 1)
        return versions

    monkeypatch.setattr(dorad.Client, "adapters", list_and_move)
    assert "GENERATION_MOVED" in doractl("adapters", "rollback", "a", code=1)


def test_every_answer_about_adapters_is_json_on_request(doractl, folder):
    def ask(*arguments):
        return json.loads(doractl("adapters", *arguments, "--output", "json"))

    assert ask("publish", "a", folder)["version"] == 1
    assert ask("publish", "a", folder)["active"]
    assert [version["version"] for version in ask("list")] == [1, 2]
    assert ask("show", "a")["version"] == 2
    assert ask("rollback", "a")["adapter"]["version"] == 1
    assert ask("activate", "a@2")["previous_version"] == 1
    assert ask("retire", "a@1")["state"] == "retiring"
    assert ask("watch", "--from", "0", "--count", "1")["type"] == "published"


def test_failed_and_gone_versions_are_listed_on_request(server, folder):
    def listed(*arguments):
        words = ["adapters", "list", "--target", server.target, *arguments]
        result = CliRunner().invoke(app, words, prog_name="doractl")
        return result.stdout.splitlines(), result.stderr

    with dorad.Client(server.target) as client:
        for _ in range(3):
            client.publish("a", path=folder)
    server.versions["a", 1].state = types_pb2.ADAPTER_STATE_FAILED
    server.versions["a", 2].state = types_pb2.ADAPTER_STATE_GONE
    (_, row), note = listed()
    assert row.split()[:2] == ["a", "3"]
    assert note == "not shown: 2 failed or gone (--all)\n"
    rows, note = listed("--all")
    assert [line.split()[1] for line in rows[1:]] == ["1", "2", "3"] and note == ""
    assert [v["version"] for v in json.loads("".join(listed("-o", "json")[0]))] == [3]
    assert len(json.loads("".join(listed("-o", "json", "--all")[0]))) == 3
    assert [v["version"] for v in yaml.safe_load("\n".join(listed("-o", "yaml")[0]))] == [3]


def test_watch_prints_events(doractl, folder):
    doractl("adapters", "publish", "a", folder)
    out = doractl("adapters", "watch", "--from", "0", "--count", "2")
    assert [line.split() for line in out.splitlines()] == [
        ["1", "published", "a@1"],
        ["2", "activated", "a@1"],
    ]
    out = doractl("adapters", "watch", "--from", "0", "--count", "2", "-o", "json")
    assert [json.loads(line)["type"] for line in out.splitlines()] == ["published", "activated"]
    out = doractl("adapters", "watch", "--from", "0", "--count", "2", "-o", "yaml")
    assert [event["type"] for event in yaml.safe_load_all(out)] == ["published", "activated"]
