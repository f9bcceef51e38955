"""Certificates for tests, made with the openssl program: a CA, and leaves that it has signed."""

import subprocess
from pathlib import Path


def _openssl(*arguments: object) -> None:
    run = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


class Authority:
    """A certificate authority in a folder of its own; `certificate` is its PEM file."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self.certificate, self._key = folder / f"{name}.crt", folder / f"{name}.key"
        _openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                 "-days", 2, "-subj", f"/CN={name}", "-keyout", self._key, "-out",
                 self.certificate)  # fmt: skip

    def sign(self, name: str) -> tuple[Path, Path]:
        """(certificate, key) for `name`, which is also good for 127.0.0.1."""
        stem = self._folder / f"{self._name}-{name}"
        request, certificate, key = (stem.with_suffix(end) for end in (".csr", ".crt", ".key"))
        extensions = stem.with_suffix(".ext")
        extensions.write_text(f"subjectAltName=DNS:{name},IP:127.0.0.1\n")
        _openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                 "-subj", f"/CN={name}", "-keyout", key, "-out", request)  # fmt: skip
        _openssl("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key,
                 "-CAcreateserial", "-days", 2, "-extfile", extensions, "-out",
                 certificate)  # fmt: skip
        return certificate, key
