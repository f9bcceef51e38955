"""A certificate authority in a folder, made with openssl's command line."""

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

Pair = tuple[Path, Path]
"""A certificate and its key."""

CONFIG = """
[ca]
default_ca = here
[here]
database = {folder}/index.txt
serial = {folder}/serial
new_certs_dir = {folder}
default_md = sha256
policy = policy
unique_subject = no
x509_extensions = extensions
[policy]
commonName = supplied
[extensions]
subjectAltName = IP:127.0.0.1,DNS:localhost
"""


def _openssl(*arguments: str | Path) -> None:
    line = ["openssl", *map(str, arguments)]
    run = subprocess.run(line, capture_output=True, text=True)
    assert run.returncode == 0, f"{' '.join(line)}\n{run.stderr}"


def _new_key(*arguments: str | Path) -> None:
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    _openssl("req", *curve, *arguments)


class Authority:
    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder / name
        self.folder.mkdir(parents=True)
        (self.folder / "index.txt").touch()
        (self.folder / "serial").write_text("01\n")
        self.config = self.folder / "ca.cnf"
        self.config.write_text(CONFIG.format(folder=self.folder))
        self.certificate, self.key = self.folder / "ca.pem", self.folder / "ca.key"
        _new_key("-x509", "-subj", f"/CN={name}", "-keyout", self.key, "-out", self.certificate)

    def issue(self, common_name: str, begin: int = -1, end: int = 2) -> Pair:
        """For a server on this host, or a client; valid between so many days from now."""
        stem = f"{common_name}-{len(list(self.folder.iterdir()))}"
        certificate, key = self.folder / f"{stem}.pem", self.folder / f"{stem}.key"
        request = self.folder / f"{stem}.csr"
        _new_key("-subj", f"/CN={common_name}", "-keyout", key, "-out", request)
        days = [datetime.now(UTC) + timedelta(days=day) for day in (begin, end)]
        first, last = (day.strftime("%Y%m%d%H%M%SZ") for day in days)
        _openssl(
            "ca", "-batch", "-notext", "-config", self.config, "-cert", self.certificate,
            "-keyfile", self.key, "-startdate", first, "-enddate", last, "-in", request,
            "-out", certificate,
        )  # fmt: skip
        return certificate, key


def install(pair: Pair, where: Pair) -> None:
    """Puts a pair where a server reads it, each file by a rename."""
    for source, target in zip(pair, where, strict=True):
        fresh = target.with_suffix(".new")
        fresh.write_bytes(source.read_bytes())
        fresh.rename(target)
