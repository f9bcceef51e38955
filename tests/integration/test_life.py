"""What a supervisor sees of the server: notifications, reloads, watchdogs, the configuration."""

import contextlib
import ctypes
import os
import re
import resource
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import yaml
from dorad.v1 import types_pb2
from lib.certificates import Authority
from lib.server import Server, binary, command, device, run_line, serve, start, wait_until
from lib.wire import failure

PROMPT = [11, 12, 13, 14, 15]
DEAF, SOFTWARE = 71, 70


def run(*words: object) -> subprocess.CompletedProcess:
    return run_line([str(binary()), *map(str, words)])


# --- Notifications.


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path):
    """A service manager's socket and the name by which the server knows it."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@dorad-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(name.replace("@", "\0"))
        listener.settimeout(30)
        yield listener, name


def next_message(listener: socket.socket) -> dict[str, str]:
    """The next one that is not the watchdog's."""
    while True:
        lines = listener.recv(4096).decode().splitlines()
        message = dict(line.split("=", 1) for line in lines)
        if message != {"WATCHDOG": "1"}:
            return message


def test_the_service_manager_learns_of_each_phase(manager, zoo, tmp_path) -> None:
    listener, name = manager
    config = tmp_path / "c.yaml"
    config.write_text("limits: {max_n: 4}\n")
    with serve(zoo.model("llama2"), config=config, NOTIFY_SOCKET=name) as server:
        assert next_message(listener)["READY"] == "1"
        before = time.monotonic()
        server.process.send_signal(signal.SIGHUP)
        reloading = next_message(listener)
        assert reloading["RELOADING"] == "1"
        assert before <= int(reloading["MONOTONIC_USEC"]) / 1e6 <= time.monotonic()
        assert next_message(listener)["READY"] == "1"
    assert next_message(listener)["STOPPING"] == "1"


def test_the_manager_s_watchdog_is_fed(manager, zoo) -> None:
    listener, name = manager
    with serve(zoo.model("llama2"), NOTIFY_SOCKET=name, WATCHDOG_USEC="200000"):
        assert next_message(listener)["READY"] == "1"
        for _ in range(3):
            assert listener.recv(4096) == b"WATCHDOG=1"


# --- Reloads.


def reload(server: Server, result: str) -> None:
    count = server.metric("dorad_config_reloads_total", result=result)
    server.process.send_signal(signal.SIGHUP)
    wait_until(
        lambda: server.metric("dorad_config_reloads_total", result=result) == count + 1,
        what=f"a reload that is {result}",
    )


def refusal(server: Server, **options) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        server.wire.generate(PROMPT, **options)
    return failure(caught.value).reason


def test_sighup_changes_what_may_change(zoo, tmp_path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("limits: {max_n: 2}\nlog: {level: info}\n")
    with serve(zoo.model("llama2"), config=config) as server:
        assert refusal(server, n=3, max_tokens=1) == "N_OUT_OF_RANGE"
        config.write_text(
            "limits: {max_n: 5}\nengine: {gpu_share: 0.5, threads: 1}\nlog: {level: debug}\n"
        )
        reload(server, "applied")
        assert len(server.wire.generate(PROMPT, n=3, max_tokens=1)) == 3
        info = server.wire.info()
        assert info.limits.max_n == 5
        wait_until(lambda: server.wire.info().engine.gpu_share == 0.5, what="the share")
        assert '"changed":"engine.gpu_share limits.max_n log.level"' in server.log()
        assert '"keys":"engine.threads"' in server.log(), "what needs a restart is named"
        # A key that is no longer in the file has its default again.
        config.write_text("")
        reload(server, "applied")
        assert server.wire.info().limits.max_n == 128


def test_a_broken_file_changes_nothing(zoo, tmp_path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("limits: {max_n: 2}\n")
    with serve(zoo.model("llama2"), config=config) as server:
        config.write_text("limits:\n  max_n: 7\n  max_m: 1\n")
        reload(server, "refused")
        assert "c.yaml:3: limits.max_m" in server.log()
        assert server.wire.info().limits.max_n == 2
        config.unlink()
        reload(server, "refused")
        assert server.wire.info().limits.max_n == 2
        config.write_text("limits: {max_n: 7}\n")
        reload(server, "applied")
        assert server.wire.info().limits.max_n == 7


def test_a_file_that_the_next_start_would_refuse_changes_nothing(zoo, tmp_path) -> None:
    config = tmp_path / "c.yaml"
    shared_memory = f"server: {{shared_memory_socket: {tmp_path}/shared_memory}}\n"
    adapters = f"adapters: {{store_path: {tmp_path}/store}}\n"
    config.write_text(shared_memory + adapters + "limits: {max_n: 2}\n")
    with serve(zoo.model("llama2"), config=config) as server:
        none = f"{tmp_path}/none"
        config.write_text(f"limits: {{max_n: 7}}\nsecurity: {{tokens_file: {none}}}\n")
        reload(server, "refused")
        assert none in server.log()
        config.write_text(f"limits: {{max_n: 7}}\nadapters: {{store_path: {none}/store}}\n")
        reload(server, "refused")
        assert server.wire.info().limits.max_n == 2
        # Its own sockets and its own store are no obstacle.
        config.write_text(shared_memory + adapters + "limits: {max_n: 7}\n")
        reload(server, "applied")
        assert server.wire.info().limits.max_n == 7


def test_the_command_line_wins_over_a_reloaded_file(zoo, tmp_path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("")
    with serve(zoo.model("llama2"), None, {"limits.max_n": 3}, config=config) as server:
        config.write_text("limits: {max_n: 9, max_logprobs_k: 5}\n")
        reload(server, "applied")
        limits = server.wire.info().limits
        assert (limits.max_n, limits.max_logprobs_k) == (3, 5)


def test_reloads_while_requests_run(zoo, tmp_path) -> None:
    """Nothing that was let in is harmed by a limit that comes later."""
    config = tmp_path / "c.yaml"
    config.write_text("")
    with serve(zoo.model("slow"), config=config) as server:
        call = server.wire.stream(PROMPT, n=4, max_tokens=100, ignore_eos=True)
        messages = [next(call)]
        config.write_text("limits: {max_n: 1, max_tokens: 5}\nadapters: {keep_last: 1}\n")
        reload(server, "applied")
        assert refusal(server, n=2, max_tokens=1) == "N_OUT_OF_RANGE"
        assert refusal(server, max_tokens=6) == "MAX_TOKENS_OUT_OF_RANGE"
        messages += call
        ended = [m.finish.usage.generated_tokens for m in messages if m.HasField("finish")]
        assert ended == [100] * 4
        for _ in range(3):
            server.wire.publish("a", zoo.adapter("slow", "lora"), activate=True)
        # The newest is active, and nothing else is among those to keep.
        wait_until(lambda: ready_versions(server, "a") == [3], what="old versions to go")


def ready_versions(server: Server, name: str) -> list[int]:
    ready = types_pb2.ADAPTER_STATE_READY
    return [v.version for v in server.wire.list_adapters(name) if v.state == ready]


# --- The configuration.


def test_print_config_says_where_values_come_from(tmp_path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("engine:\n  kv_bytes: 64MiB\n  threads: 2\n")
    words = ["--config", path, "--set", "engine.threads=1", "--model", "/m", "--adapter", "a=/a"]
    printed = run("print-config", *words)
    assert printed.returncode == 0, printed.stderr
    assert f"  kv_bytes: 64MiB  # {path}:2\n" in printed.stdout
    assert "  threads: 1  # --set\n" in printed.stdout
    assert '  path: "/m"  # --model\n' in printed.stdout
    assert "  preload:  # --adapter\n" in printed.stdout
    assert "  max_n: 128  # default\n" in printed.stdout
    assert yaml.safe_load(printed.stdout)["adapters"]["preload"] == {"a": "/a"}
    again = tmp_path / "again.yaml"
    again.write_text(printed.stdout)
    values = run("print-config", "--config", again).stdout
    assert yaml.safe_load(values) == yaml.safe_load(printed.stdout)
    bad = run("print-config", "--set", "engine.threads=many")
    assert bad.returncode == 78 and "engine.threads" in bad.stderr


def test_check_config_finds_what_a_start_would(zoo, tmp_path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "server:\n"
        "  grpc_listen: 127.0.0.1:7777\n"
        "  admin_listen: 127.0.0.1:7777\n"
        f"  shared_memory_socket: {tmp_path}/none/shared_memory.sock\n"
        f"model:\n  path: {tmp_path}/no-model\n"
        f"adapters:\n  preload:\n    a: {tmp_path}/no-adapter\n"
        f"  store_path: {tmp_path}/nowhere/store\n"
    )
    checked = run("check-config", path)
    assert checked.returncode == 78
    for problem in ("no-model", "preload.a", "admin_listen", "shared_memory_socket", "store_path"):
        assert problem in checked.stderr, problem
    assert "ready" not in run("serve", "--config", path).stdout
    assert all("[" in line for line in checked.stderr.splitlines()[1:]), "each has its reason"
    path.write_text(f"model:\n  path: {zoo.model('llama2')}\n  max_context: 1000000\n")
    checked = run("check-config", path)
    assert checked.returncode == 78 and "max_context" in checked.stderr
    path.write_text(
        f"model:\n  path: {zoo.model('llama2')}\n"
        f"adapters:\n  preload:\n    a: {zoo.adapter('llama2', 'dora')}\n"
        f"  store_path: {tmp_path}/store\n"
    )
    checked = run("check-config", path)
    assert checked.returncode == 0, checked.stderr
    assert not (tmp_path / "store").exists(), "checking makes nothing"


LOCAL, ANY = "127.0.0.1:1", "0.0.0.0:1"
BAD, UNIX = "{folder}/bad.yaml", "unix:{folder}/s"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"server.grpc_listen": "localhost:1", "server.metrics_listen": LOCAL}, "PORT_IN_USE"),
        ({"server.admin_listen": LOCAL, "server.metrics_listen": ANY}, "PORT_IN_USE"),
        ({"server.grpc_listen": UNIX, "server.shared_memory_socket": "{folder}/s"}, "PORT_IN_USE"),
        ({"server.grpc_listen": UNIX, "server.admin_listen": "unix:{folder}/./s"}, "PORT_IN_USE"),
        ({"server.grpc_listen": "unix:{folder}/bad.yaml"}, "LISTEN_FAILED"),
        ({"server.grpc_listen": "unix:{folder}"}, "LISTEN_FAILED"),
        ({"server.shared_memory_socket": BAD}, "LISTEN_FAILED"),
        ({"adapters.store_path": BAD}, "STORE_UNAVAILABLE"),
        ({"engine.kv_bytes": 1}, "KV_TOO_SMALL"),
        ({"engine.kv_bytes": "900TiB", "model.device": "cpu"}, "OUT_OF_MEMORY"),
        ({"engine.kv_dtype": "fp8", "model.device": "cpu"}, "KV_DTYPE_UNSUPPORTED"),
        ({"engine.kv_bytes": "900TiB", "model.device": "cuda"}, "KV_TOO_LARGE|DEVICE_NOT_BUILT"),
        (
            {"engine.kv_dtype": "fp8", "model.device": "cuda"},  # its heads have 16 elements
            "KV_DTYPE_UNSUPPORTED|DEVICE_NOT_BUILT",
        ),
        ({"adapters.preload.Bad Name": "{adapter}"}, "ADAPTER_NAME_INVALID"),
        ({"security.tokens_file": "{folder}/none.yaml"}, "FILE_NOT_FOUND"),
        ({"security.tokens_file": BAD}, "TOKENS_"),
        ({"security.tls_cert": BAD, "security.tls_key": BAD}, "TLS_"),
    ],
)
def test_check_config_and_serve_say_the_same(zoo, tmp_path, settings: dict, problem: str) -> None:
    (tmp_path / "bad.yaml").write_text("tokens: [{}]\n")
    places = {"folder": tmp_path, "adapter": zoo.adapter("llama2", "dora")}
    tree: dict = {"model": {"path": str(zoo.model("llama2"))}, "log": {"format": "text"}}
    for key, value in settings.items():
        *sections, last = key.split(".")
        values = tree
        for section in sections:
            values = values.setdefault(section, {})
        values[last] = value.format(**places) if isinstance(value, str) else value
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(tree))
    checked = run("check-config", path)
    assert checked.returncode == 78 and re.search(problem, checked.stderr), checked
    served = run("serve", "--config", path)
    assert served.returncode == 78 and served.stderr.strip().endswith(checked.stderr.strip())


@pytest.mark.skipif(device() != "cpu", reason="the KV cache lies in the GPU's memory")
def test_a_kv_cache_that_cannot_be_allocated_is_a_fault_of_the_configuration(zoo) -> None:
    settings = {"engine.kv_bytes": "2GiB", "log.format": "text"}
    line = command(zoo.model("llama2"), None, settings)
    served = subprocess.run(
        ["prlimit", f"--data={3 << 29}", *line], capture_output=True, text=True, timeout=60
    )
    assert served.returncode == 78, served
    assert "engine.kv_bytes" in served.stderr and "[OUT_OF_MEMORY]" in served.stderr
    assert "frame #" not in served.stderr, "no backtrace"


# --- Watchdogs.


def test_the_soft_limit_of_descriptors_is_raised(zoo, tmp_path) -> None:
    line = ["prlimit", "--nofile=256:1234", *command(zoo.model("llama2"))]
    server = start(line, tmp_path / "server.log")
    try:
        assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (1234, 1234)
    finally:
        server.wire.close()
        assert server.stop() == 0


def test_an_unresponsive_listener_ends_the_process_and_a_new_one_serves(zoo, tmp_path) -> None:
    """gRPC 1.51 never accepts again once it has run out of descriptors (CVE-2023-4785)."""
    settings = {"server.listener_check_seconds": 0.3, "server.drain_delay_seconds": 3}
    line = command(zoo.model("llama2"), None, settings)
    server = start(line, tmp_path / "server.log")
    try:
        server.wire.generate(PROMPT, max_tokens=1)
        used = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used + 20, used + 20))
        host, port = server.grpc.split(":")
        with contextlib.ExitStack() as connections:
            for _ in range(150):
                connections.enter_context(socket.create_connection((host, int(port)), 10))
            time.sleep(0.2)
        wait_until(lambda: "shutting down" in server.log(), 90, what="the end")
        # A supervisor's, which knows nothing of it and is the first: it is no hurry.
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(90) == DEAF
    finally:
        server.wire.close()
        server.process.kill()
        server.process.wait()
    assert "a listener accepts no connections any more" in server.log()
    assert '"in_a_hurry":false' in server.log()
    with serve(zoo.model("llama2"), None, {"server.grpc_listen": server.grpc}) as again:
        assert len(again.wire.generate(PROMPT, max_tokens=1)) == 1


@pytest.mark.parametrize("encrypted", [False, True])
def test_listener_checks_do_no_harm(zoo, tmp_path, encrypted: bool) -> None:
    """Also to listeners on socket files, and to those that expect a TLS handshake of a client."""
    authority = Authority(tmp_path)
    certificate, key = authority.issue("dorad")
    settings = {
        "server.listener_check_seconds": 0.05,
        "server.admin_listen": f"unix:{tmp_path / 'admin.sock'}",
    }
    if encrypted:
        settings |= {
            "security.tls_cert": certificate,
            "security.tls_key": key,
            "security.tls_client_ca": authority.certificate,
        }
    with serve(zoo.model("llama2"), None, settings) as server:
        descriptors = Path(f"/proc/{server.pid}/fd")
        before = len(list(descriptors.iterdir()))
        time.sleep(1.5)
        if encrypted:
            parts = [path.read_bytes() for path in (authority.certificate, key, certificate)]
            channel = grpc.secure_channel(server.grpc, grpc.ssl_channel_credentials(*parts))
        else:
            channel = grpc.insecure_channel(server.grpc)
        grpc.channel_ready_future(channel).result(60)
        channel.close()
        wait_until(lambda: len(list(descriptors.iterdir())) <= before + 5, what="connections to go")
        assert "accepts no connections" not in server.log()


def ptrace(operation: int, thread: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(operation, thread, None, None) != 0:
        pytest.skip(f"ptrace is not permitted here: {os.strerror(ctypes.get_errno())}")


def threads(pid: int) -> dict[str, int]:
    folders = Path(f"/proc/{pid}/task").iterdir()
    return {(folder / "comm").read_text().strip(): int(folder.name) for folder in folders}


def test_a_stalled_engine_ends_the_process_with_every_stack_in_the_log(zoo, tmp_path) -> None:
    seize, interrupt, wall = 0x4206, 0x4207, 0x40000000
    line = command(zoo.model("slow"), None, {"engine.watchdog_seconds": 5})
    server = start(line, tmp_path / "server.log")
    engine = threads(server.pid)["engine"]
    try:
        call = server.wire.stream(PROMPT, max_tokens=5000, ignore_eos=True)
        next(call)
        ptrace(seize, engine)
        ptrace(interrupt, engine)
        # The thread that is traced has to be waited for before the process can be.
        wait_until(lambda: "ended" if gone(engine, wall) else None, 60, what="the process to end")
        assert server.process.wait(20) == SOFTWARE
    finally:
        server.wire.close()
        server.process.kill()
        server.process.wait()
    log = server.log()
    assert "the engine makes no progress" in log
    stacks = [text for text in log.splitlines() if "stack of a thread" in text]
    assert len(stacks) > 5
    assert any('"thread":"engine"' in text for text in stacks)
    assert any("dorad::Signals::Wait" in text for text in stacks), "the main thread's"


def test_a_step_that_hangs_cannot_hold_up_the_end(zoo, tmp_path) -> None:
    """Though the watchdog still has patience with it."""
    settings = {"engine.watchdog_seconds": 60, "server.drain_timeout_seconds": 1}
    line = command(zoo.model("llama2"), None, settings)
    server = start(line, tmp_path / "server.log", DORAD_FAILPOINT="engine_step:5=hang")
    try:
        call = server.wire.stream(PROMPT, max_tokens=100, ignore_eos=True)
        next(call)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(50) == SOFTWARE, "the watchdog would take a minute"
    finally:
        server.wire.close()
        server.process.kill()
        server.process.wait()
    assert '"waits_for":"a step of the engine"' in server.log()
    assert "stack of a thread" in server.log()


def test_a_load_that_hangs_cannot_hold_up_the_end(zoo, tmp_path) -> None:
    settings = {
        "adapters.store_path": tmp_path / "store",
        "server.drain_timeout_seconds": 0.5,
    }
    line = command(zoo.model("llama2"), None, settings)
    server = start(line, tmp_path / "server.log", DORAD_FAILPOINT="store_tmp_written=hang")
    try:
        with ThreadPoolExecutor(1) as pool:
            folder = zoo.adapter("llama2", "dora")
            publish = pool.submit(server.wire.publish, "a", folder, durable=True)
            wait_until(lambda: list((tmp_path / "store" / "tmp").iterdir()), what="the load")
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0
            with pytest.raises(grpc.RpcError):
                publish.result()
    finally:
        server.wire.close()
        server.process.kill()
        server.process.wait()
    assert '"waits_for":"loads of adapters"' in server.log()


def test_a_drain_waits_for_a_publish_that_waits_for_the_disk(zoo, tmp_path) -> None:
    """Which has no version that could be LOADING; the disk never answers here."""
    settings = {"adapters.store_path": tmp_path / "store", "server.drain_timeout_seconds": 4}
    line = command(zoo.model("llama2"), None, settings)
    # The second append is the version's number.
    server = start(line, tmp_path / "server.log", DORAD_FAILPOINT="journal_before_sync:2=hang")
    journal = tmp_path / "store" / "journal"
    try:
        with ThreadPoolExecutor(1) as pool:
            before = journal.stat().st_size
            publish = pool.submit(server.wire.publish, "a", zoo.adapter("llama2", "dora"))
            wait_until(lambda: journal.stat().st_size > before, what="the number")
            begin = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.RpcError):
                publish.result(60)
            assert time.monotonic() - begin > 3.5
            assert server.process.wait(60) == 0
    finally:
        server.wire.close()
        server.process.kill()
        server.process.wait()
    assert '"waits_for":"changes of the registry"' in server.log()


def gone(thread: int, options: int) -> bool:
    """Whether a traced thread has ended, and not only stopped."""
    pid, status = os.waitpid(thread, options | os.WNOHANG)
    return pid == thread and (os.WIFEXITED(status) or os.WIFSIGNALED(status))


def test_a_cache_below_one_context_tells_how_large_it_should_be(zoo) -> None:
    with serve(zoo.model("llama2"), None, {"engine.kv_bytes": 64 << 10}) as server:
        small = server.wire.info().model
        assert f'"engine.kv_bytes_needed":{small.whole_context_kv_bytes}' in server.log()
    assert 0 < small.context_length < small.whole_context_length
    settings = {"engine.kv_bytes": small.whole_context_kv_bytes}
    with serve(zoo.model("llama2"), None, settings) as server:
        assert server.wire.info().model.context_length == small.whole_context_length
        assert "kv_bytes_needed" not in server.log()
