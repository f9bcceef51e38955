"""The real nginx with deploy/nginx's files in front of servers of a test."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import grpc

from lib.certificates import Authority
from lib.server import ROOT, free_port, wait_until

FILES = ROOT / "deploy" / "nginx"


def _replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
    return text.replace(old, new)


class Nginx:
    """A running nginx; `public` and `admin` are its two ports on 127.0.0.1."""

    def __init__(
        self, folder: Path, servers: Sequence[str], changes: Mapping[str, str] | None = None
    ) -> None:
        """`changes` replaces texts of dorad.conf, each of which must be there once."""
        self.folder = folder
        self.public, self.admin = free_port(), free_port()
        self.authority = Authority(folder, "servers")
        self.clients = Authority(folder, "clients")
        certificate, key = self.authority.issue("dorad.test")
        for name in ("nginx.conf", "dorad-errors.conf"):
            shutil.copy(FILES / name, folder / name)
        text = (FILES / "dorad.conf").read_text()
        for old, new in {
            "listen 443 ": f"listen 127.0.0.1:{self.public} ",
            "listen 8443 ": f"listen 127.0.0.1:{self.admin} ",
            "/etc/dorad/tls/tls.crt": str(certificate),
            "/etc/dorad/tls/tls.key": str(key),
            "/etc/dorad/tls/client-ca.crt": str(self.clients.certificate),
            **(changes or {}),
        }.items():
            text = _replaced(text, old, new)
        (folder / "dorad.conf").write_text(text)
        main = (folder / "nginx.conf").read_text()
        main = _replaced(main, "/var/log/nginx/error.log", str(folder / "error.log"))
        main = _replaced(main, "/var/log/nginx/access.log", str(folder / "access.log"))
        main = _replaced(main, "worker_processes auto;", "worker_processes 2;")
        if os.geteuid() != 0:
            main = _replaced(main, "user www-data;\n", "")  # only root can, and nginx would warn
        (folder / "nginx.conf").write_text(main)
        lines = [f"server {server} max_fails=0;\n" for server in servers]
        (folder / "dorad-servers.conf").write_text("".join(lines))
        self._process: subprocess.Popen | None = None

    def _command(self, *more: str) -> list[str]:
        program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
        assert program, "nginx is not installed: tools/apt-packages.txt lists it"
        directives = f"daemon off; pid {self.folder}/nginx.pid;"
        return [program, "-c", f"{self.folder}/nginx.conf", "-g", directives, *more]

    def check(self) -> None:
        """What `nginx -t` says of the files."""
        run = subprocess.run(self._command("-t"), capture_output=True, text=True, timeout=30)
        assert run.returncode == 0 and "[warn]" not in run.stderr, run.stderr

    def start(self) -> None:
        with (self.folder / "stderr").open("wb") as log:
            self._process = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

        def listening() -> bool:
            assert self._process.poll() is None, self.log()
            for port in (self.public, self.admin):
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                except OSError:
                    return False
            return True

        wait_until(listening, what="nginx to listen")

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise

    def log(self) -> str:
        """The end of what nginx has to say."""
        paths = [self.folder / name for name in ("stderr", "error.log")]
        return "".join(path.read_text()[-4000:] for path in paths if path.exists())

    def access_log(self) -> list[str]:
        return (self.folder / "access.log").read_text().splitlines()

    def credentials(self, certified: bool = False) -> grpc.ChannelCredentials:
        root = self.authority.certificate.read_bytes()
        if not certified:
            return grpc.ssl_channel_credentials(root)
        certificate, key = self.clients.issue("operator")
        return grpc.ssl_channel_credentials(root, key.read_bytes(), certificate.read_bytes())


@contextlib.contextmanager
def nginx(servers: Sequence[str], changes: Mapping[str, str] | None = None) -> Iterator[Nginx]:
    """nginx in front of `servers` (host:port each)."""
    with tempfile.TemporaryDirectory(prefix="dorad-nginx-") as scratch:
        # Its workers run as another user when the test runs as root.
        os.chmod(scratch, 0o755)
        proxy = Nginx(Path(scratch), servers, changes)
        try:
            proxy.start()
            yield proxy
        except BaseException:
            print(f"--- log of nginx\n{proxy.log()}")
            raise
        finally:
            proxy.stop()
