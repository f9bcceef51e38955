"""A connection that speaks HTTP/2 frame by frame, also such as no client would send.

It knows no rules: what is sent is what the test says. Attacks come from 127.0.0.9, so that a limit
for each client's address meets nobody else.
"""

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Iterable, Sequence

import hpack
from hyperframe import frame as frames

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
ATTACKER = "127.0.0.9"

Headers = list[tuple[str, str]]


def grpc_headers(path: str, *more: tuple[str, str]) -> Headers:
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "dorad"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *more,
    ]


def grpc_message(body: bytes) -> bytes:
    return struct.pack(">BI", 0, len(body)) + body


def raw_frame(kind: int, flags: int, stream: int, body: bytes, length: int | None = None) -> bytes:
    """A frame of any kind; `length` is what its head says, if not the truth."""
    size = len(body) if length is None else length
    return struct.pack(">I", size)[1:] + struct.pack(">BBI", kind, flags, stream) + body


class Http2:
    """One connection to host:port; TLS (unverified, ALPN h2) if asked for. Close it."""

    def __init__(self, target: str, tls: bool, timeout: float = 10.0) -> None:
        self.socket = open_socket(target)
        self.socket.settimeout(timeout)
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_alpn_protocols(["h2"])
            self.socket = context.wrap_socket(self.socket)
        self._encoder = hpack.Encoder()
        self._input = b""

    def __enter__(self) -> "Http2":
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> bool:
        """False when the peer has closed, or takes nothing any more."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def frame(self, frame: frames.Frame) -> bool:
        return self.send(frame.serialize())

    def greet(self, **settings: int) -> bool:
        """The preface and SETTINGS; the peer's SETTINGS are left without an answer."""
        numbers = {getattr(frames.SettingsFrame, name): value for name, value in settings.items()}
        return self.send(PREFACE + frames.SettingsFrame(0, settings=numbers).serialize())

    def acknowledge(self) -> bool:
        return self.frame(frames.SettingsFrame(0, flags=["ACK"]))

    def headers_frames(self, stream: int, headers: Headers, *, end: bool = False) -> bytes:
        """HEADERS, and CONTINUATIONs of what does not fit into one frame."""
        block = self._encoder.encode(headers)
        pieces = [block[at : at + 16384] for at in range(0, len(block), 16384)] or [b""]
        data = b""
        for index, piece in enumerate(pieces):
            kind = frames.HeadersFrame if index == 0 else frames.ContinuationFrame
            frame = kind(stream, data=piece)
            if index == 0 and end:
                frame.flags.add("END_STREAM")
            if index == len(pieces) - 1:
                frame.flags.add("END_HEADERS")
            data += frame.serialize()
        return data

    def call(self, stream: int, path: str, body: bytes, *more: tuple[str, str]) -> bool:
        """A whole unary request."""
        data = frames.DataFrame(stream, data=grpc_message(body), flags=["END_STREAM"])
        return self.send(self.headers_frames(stream, grpc_headers(path, *more)) + data.serialize())

    def closed_within(self, seconds: float) -> bool:
        """Reads and forgets until the peer closes."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.socket.settimeout(left)
            try:
                if not self.socket.recv(1 << 16):
                    return True
            except TimeoutError:
                return False
            except OSError:
                return True
        return False

    def unfinished_call(self, path: str, size: int, *more: tuple[str, str]) -> dict[str, str]:
        """Sends a message of `size` bytes except the last one, as far as the peer's windows allow.

        Returns the trailers of the answer; none when the peer has closed before.
        """
        self.greet()
        self.send(self.headers_frames(1, grpc_headers(path, *more)))
        body = memoryview(struct.pack(">BI", 0, size) + bytes(size - 1))
        windows, initial = {0: 65535, 1: 65535}, 65535
        decoder, sent = hpack.Decoder(), 0
        while True:
            while (room := min(16384, *windows.values(), len(body) - sent)) > 0:
                piece = body[sent : sent + room].tobytes()
                if not self.frame(frames.DataFrame(1, data=piece)):
                    return {}
                sent += room
                windows = {stream: window - room for stream, window in windows.items()}
            data = self.socket.recv(1 << 16)
            if not data:
                return {}
            self._input += data
            for frame in self._whole_frames():
                if isinstance(frame, frames.WindowUpdateFrame) and frame.stream_id in windows:
                    windows[frame.stream_id] += frame.window_increment
                elif isinstance(frame, frames.SettingsFrame) and "ACK" not in frame.flags:
                    self.acknowledge()
                    new = frame.settings.get(frames.SettingsFrame.INITIAL_WINDOW_SIZE, initial)
                    windows[1] += new - initial
                    initial = new
                elif isinstance(frame, frames.HeadersFrame):
                    fields = dict(decoder.decode(frame.data))
                    if "END_STREAM" in frame.flags:
                        return fields

    def read(self, seconds: float) -> list[frames.Frame]:
        """The frames that come until the peer closes, or `seconds` have passed."""
        end = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            while (left := end - time.monotonic()) > 0:
                self.socket.settimeout(left)
                data = self.socket.recv(1 << 16)
                if not data:
                    break
                self._input += data
        return self._whole_frames()

    def _whole_frames(self) -> list[frames.Frame]:
        found: list[frames.Frame] = []
        while len(self._input) >= 9:
            frame, length = frames.Frame.parse_frame_header(memoryview(self._input[:9]))
            if len(self._input) < 9 + length:
                break
            frame.parse_body(memoryview(self._input[9 : 9 + length]))
            self._input = self._input[9 + length :]
            found.append(frame)
        return found


def open_socket(target: str) -> socket.socket:
    host, _, port = target.rpartition(":")
    return socket.create_connection((host, int(port)), 10, source_address=(ATTACKER, 0))


def joined(parts: Iterable[bytes], at_once: int = 500) -> Iterable[bytes]:
    """The parts in larger pieces."""
    piece: list[bytes] = []
    for part in parts:
        piece.append(part)
        if len(piece) == at_once:
            yield b"".join(piece)
            piece = []
    yield b"".join(piece)


def close_all(sockets: Sequence[socket.socket]) -> None:
    for one in sockets:
        one.close()
