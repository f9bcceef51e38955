"""docs/guides/deployment.md: its commands work as they are written, below a folder of the test."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from lib.server import ROOT, binary

PAGE = (ROOT / "docs" / "guides" / "deployment.md").read_text()
# In the place of what a test must not do: the least of it that the next commands need.
STUBS = {
    "git": 'cp -a "$2" "$3"',
    "make": """mkdir -p build .venv/bin
        ln -s "$BINARY" build/dorad
        ln -s /bin/true .venv/bin/doractl""",
    "systemd-sysusers": 'exec /usr/bin/systemd-sysusers --root="$HOST"',
    "systemd-tmpfiles": 'exec /usr/bin/systemd-tmpfiles --root="$HOST" "$@"',
    # The folder of the test is root's alone: who else runs the command cannot be tried here.
    "runuser": """test "$1 $2 $3" = "-u dorad --"
        shift 3
        exec "$@" """,
    "systemctl": "",
    "journalctl": "",
    "nginx": "",
    "apt-get": 'mkdir -p "$HOST/etc/nginx"',
}


def commands(section: str) -> str:
    """The first block of commands of a section."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]


class Host:
    """Folders of a machine on which nothing of dorad's is, and a clone of the repository."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "host"
        for name in ("etc", "opt", "etc/tmpfiles.d", "etc/systemd/system"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self.clone = folder / "clone"
        shutil.copytree(ROOT / "deploy", self.clone / "deploy")
        self.stubs = folder / "stubs"
        self.stubs.mkdir()
        for name, line in STUBS.items():
            path = self.stubs / name
            path.write_text(f"#!/bin/bash\nset -e\n{line}\n")
            path.chmod(0o755)

    def run(self, script: str, start: Path) -> None:
        script = re.sub(r"(?<!\S)/(etc|opt)/", rf"{self.root}/\1/", script)
        script = script.replace("REPOSITORY", str(self.clone))
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=start,
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ
            | {
                "PATH": f"{self.stubs}:/usr/bin:/bin",
                "HOST": str(self.root),
                "BINARY": str(binary()),
            },
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders to a user")
def test_after_the_systemd_section_the_configuration_passes_before_the_first_start(
    tmp_path: Path,
) -> None:
    host = Host(tmp_path)
    config = host.clone / "deploy" / "dorad.yaml"
    text = config.read_text()
    for old, new in {
        'store_path: ""': f'store_path: "{host.root}/var/lib/dorad/store"',
        'shared_memory_socket: ""': f'shared_memory_socket: "{host.root}/run/dorad/shared_memory"',
    }.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    config.write_text(text)
    script = commands("systemd")
    assert script.index("check-config") < script.index("systemctl")
    host.run(script, start=tmp_path)
    assert (host.root / "etc/systemd/system/dorad.service").is_file()


def test_the_nginx_section_needs_nothing_of_another_section(tmp_path: Path) -> None:
    host = Host(tmp_path)
    for name in ("server.crt", "server.key", "ca.crt"):
        (host.clone / name).write_text("")
    host.run(commands("nginx"), start=host.clone)
    files = (host.root / "etc/dorad/tls").iterdir()
    modes = {path.name: path.stat().st_mode & 0o777 for path in files}
    assert modes == {"tls.crt": 0o644, "tls.key": 0o600, "client-ca.crt": 0o644}
    assert (host.root / "etc/nginx/dorad.conf").is_file()


def test_arguments_of_a_build_are_given_to_commands_that_take_them() -> None:
    texts = [PAGE, *(path.read_text() for path in (ROOT / "deploy" / "docker").iterdir())]
    dockerfile = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    found = [line for text in texts for line in text.splitlines() if "--build-arg" in line]
    assert found
    for line in found:
        assert re.search(r"docker (compose -f \S+ )?build [^`]*--build-arg", line), line
        for name in re.findall(r"--build-arg (\w+)=", line):
            assert f"\nARG {name}=" in dockerfile
