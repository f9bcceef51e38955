"""The client's credentials: TLS and tokens, from arguments or from the environment."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from dorad._channel import DEFAULT_PORT, DEFAULT_TARGET

StrPath = str | os.PathLike[str]

# gRPC takes proxies from the environment in two ways: http_proxy, https_proxy or grpc_proxy, and
# GRPC_ADDRESS_HTTP_PROXY. Without TLS each could read the token.
_NO_PROXY: dict[str, Any] = {
    "grpc.enable_http_proxy": 0,
    "grpc.address_http_proxy_enabled_addresses": "",
}


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # A name, or several addresses.
        return False


def _is_v6(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).version == 6
    except ValueError:
        return False


_ADDRESS = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<name>[^:\[\]]+))(?::[0-9]+)?")


def host_of(address: str) -> str:
    """The host of "host", "host:port", "[v6]", "[v6]:port" or "v6"; other text is returned as it
    is."""
    match = _ADDRESS.fullmatch(address)
    return address if match is None else match["v6"] or match["name"]


def check_target(target: object) -> None:
    """Raises TypeError or ValueError for a URL, a path, or a thing that is no text."""
    if not isinstance(target, str):
        kind = type(target).__name__
        raise TypeError(f'a target is text such as "{DEFAULT_TARGET}", not {kind}')
    if not target or any(character.isspace() for character in target):
        raise ValueError(f"the target {target!r} is empty or contains spaces")
    if match := re.fullmatch(r"(https?|grpcs?|tcp)://([^/]*)(/.*)?", target):
        tls = ", and ca_file (or DORAD_CA_FILE) for TLS" if match[1][-1] == "s" else ""
        raise ValueError(f'the target {target!r} is a URL: give "{match[2]}"{tls}')
    if target.startswith("/"):
        raise ValueError(f'the target {target!r} is a path: a socket file is "unix:{target}"')


def check_port(target: str) -> None:
    """Raises ValueError for a host without port: gRPC would take 443."""
    scheme, colon, address = target.partition(":")
    if colon and scheme in ("unix", "unix-abstract", "ipv4", "ipv6"):
        return
    if colon and scheme == "dns":
        address = re.sub(r"^(//[^/]*)?/", "", address)
    elif re.match(r"[a-z][a-z0-9+.-]*:/", target):  # Another scheme of gRPC's.
        return
    else:
        address = target
    host = f"[{address}]" if _is_v6(address) else address
    if re.fullmatch(r"(\[[^\[\]]+\]|[^:\[\]]+):?", host):
        host = host.removesuffix(":")
        raise ValueError(f'the target {target!r} has no port: give "{host}:{DEFAULT_PORT}"')
    port = address.rpartition(":")[2]
    if port.isdecimal() and not 0 < int(port) < 1 << 16:
        raise ValueError(f"the port of the target {target!r} is not in [1, 65535]")


def is_local(target: str) -> bool:
    """Whether the target is this host, so that plain text is safe."""
    scheme, colon, path = target.partition(":")
    if colon and scheme in ("unix", "unix-abstract"):
        return True
    if "%" in target:  # gRPC decodes it, possibly to a list of addresses.
        return False
    if not colon or scheme not in ("dns", "ipv4", "ipv6"):
        return is_loopback(host_of(target))
    if path.startswith("//"):
        authority, _, path = path.removeprefix("//").partition("/")
        if authority:  # Another host resolves the name.
            return False
    # gRPC connects to any of them.
    addresses = [path] if scheme == "dns" else path.split(",")
    return all(is_loopback(host_of(address.removeprefix("/"))) for address in addresses)


def _given(value: StrPath | None, variable: str) -> str | None:
    """An argument, or else the environment variable; empty means not given."""
    return (os.fspath(value) if value is not None else os.environ.get(variable)) or None


def _read(path: str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


def _without_proxy(options: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return list((dict(options) | _NO_PROXY).items())


@dataclass(frozen=True)
class Access:
    """A client's credentials. Made once for all of its connections."""

    token: str | None = field(default=None, repr=False)
    credentials: grpc.ChannelCredentials | None = None

    @classmethod
    def of(
        cls,
        token: str | None,
        ca_file: StrPath | None,
        cert_file: StrPath | None,
        key_file: StrPath | None,
        credentials: grpc.ChannelCredentials | None,
    ) -> Access:
        """Reads the files. The defaults are DORAD_TOKEN, DORAD_CA_FILE, DORAD_CERT_FILE and
        DORAD_KEY_FILE; `credentials` exclude files."""
        token = _given(token, "DORAD_TOKEN")
        if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
            raise ValueError("a token consists of printable ASCII characters without spaces")
        if credentials is not None:
            if ca_file is not None or cert_file is not None or key_file is not None:
                raise ValueError("give either credentials or ca_file, cert_file and key_file")
            return cls(token, credentials)
        ca = _given(ca_file, "DORAD_CA_FILE")
        cert = _given(cert_file, "DORAD_CERT_FILE")
        key = _given(key_file, "DORAD_KEY_FILE")
        if (cert is None) != (key is None):
            raise ValueError("cert_file and key_file must be given together")
        if ca is None and cert is None:
            return cls(token)
        return cls(token, grpc.ssl_channel_credentials(_read(ca), _read(key), _read(cert)))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of each call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    def channel_credentials(self, target: str) -> grpc.ChannelCredentials | None:
        """None: plain text, as always for a socket file.

        Raises ValueError rather than send a token over a network in plain text.
        """
        if target.startswith(("unix:", "unix-abstract:")):
            return None
        if self.credentials is None and self.token is not None and not is_local(target):
            raise ValueError(
                f"the token would be sent to {target} in plain text: give ca_file "
                "(or DORAD_CA_FILE), or use a proxy on this host"
            )
        return self.credentials

    # With TLS a proxy only forwards bytes (CONNECT), so the environment's proxy is safe.

    def channel(self, target: str, options: list[tuple[str, Any]]) -> grpc.Channel:
        credentials = self.channel_credentials(target)
        if credentials is None:
            return grpc.insecure_channel(target, _without_proxy(options))
        return grpc.secure_channel(target, credentials, options)

    def aio_channel(self, target: str, options: list[tuple[str, Any]]) -> grpc.aio.Channel:
        credentials = self.channel_credentials(target)
        if credentials is None:
            return grpc.aio.insecure_channel(target, _without_proxy(options))
        return grpc.aio.secure_channel(target, credentials, options)


def check_encrypted(target: str, token: str, allow_insecure: bool) -> None:
    """Raises ValueError for a server on another host that is reached in plain text."""
    encrypted = Access.of(token or None, None, None, None, None).credentials is not None
    if not is_local(target) and not encrypted and not allow_insecure:
        raise ValueError(
            f"{target} is reached in plain text: set DORAD_CA_FILE, use a proxy on this "
            "host, or pass --allow-insecure"
        )
