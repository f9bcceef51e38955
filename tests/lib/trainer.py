"""A trainer on the server's host that hands its memory over, without the client library.

Run as a program it is one that gets killed:

    trainer.py TARGET SOCKET FOLDER NAME [before|wait]

hands the adapter in FOLDER over, prints "handed over", publishes it as NAME (with "wait" when it
gets SIGUSR1, with "before" never), prints "published", and stays there.
"""

import json
import mmap
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

import grpc
from dorad.v1 import adapters_pb2, adapters_pb2_grpc

FILE, CUDA_IPC = 1, 2
REGISTRATION = struct.Struct("<8sIIQ64s16s")


def registration(size: int, kind: int = FILE, zero: int = 0, handle: bytes = b"") -> bytes:
    return REGISTRATION.pack(b"DORADMEM", kind, zero, size, handle, b"")


class SharedMemory:
    """A connection to the shared-memory socket."""

    def __init__(self, path: str | Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(30)
        self.socket.connect(str(path))

    def send(self, message: bytes, fds: list[int]) -> tuple[int, int, bytes, str]:
        """The answer: code, index, session_token, reason and message."""
        socket.send_fds(self.socket, [message], fds)
        answer = self.socket.recv(1024)
        return *struct.unpack_from("<II16s", answer), answer[24:].decode()

    @property
    def ended(self) -> bool:
        """The server has closed its end."""
        return self.socket.recv(1) == b""

    def close(self) -> None:
        self.socket.close()


class Trainer:
    """An adapter's tensors in a memory file that has been handed over."""

    def __init__(self, path: str | Path, folder: Path) -> None:
        image = (folder / "adapter_model.safetensors").read_bytes()
        length = int.from_bytes(image[:8], "little")
        self.header = json.loads(image[8 : 8 + length])
        self.header.pop("__metadata__", None)
        self.config = (folder / "adapter_config.json").read_text()
        data = image[8 + length :]
        self.fd = os.memfd_create("trainer")
        os.ftruncate(self.fd, len(data))
        self.memory = mmap.mmap(self.fd, len(data))
        self.memory[:] = data
        self.shared_memory = SharedMemory(path)
        code, self.index, self.session_token, text = self.shared_memory.send(
            registration(len(data)), [self.fd]
        )
        assert code == 0, text

    def tensors(self) -> list[adapters_pb2.MemoryTensor]:
        return [
            adapters_pb2.MemoryTensor(
                name=name,
                dtype=adapters_pb2.TensorDtype.Value(f"TENSOR_DTYPE_{entry['dtype']}"),
                shape=entry["shape"],
                memory=self.index,
                offset=entry["data_offsets"][0],
            )
            for name, entry in self.header.items()
        ]

    def request(self, name: str, **changes) -> adapters_pb2.PublishFromMemoryRequest:
        values = dict(
            name=name,
            session_token=self.session_token,
            tensors=self.tensors(),
            adapter_config_json=self.config,
            activate=True,
        )
        return adapters_pb2.PublishFromMemoryRequest(**values | changes)

    def close(self) -> None:
        self.shared_memory.close()
        self.memory.close()
        os.close(self.fd)

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def main() -> None:
    signal.alarm(120)
    target, path, folder, name, *options = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    trainer = Trainer(path, Path(folder))
    print("handed over", flush=True)
    if "wait" in options:
        signal.sigwait({signal.SIGUSR1})
    if "before" not in options:
        channel = grpc.insecure_channel(target)
        stub = adapters_pb2_grpc.AdapterServiceStub(channel)
        stub.PublishFromMemory(trainer.request(name), timeout=100)
        print("published", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
