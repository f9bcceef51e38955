"""Links that the random life of a fleet cuts (lib.partitions)."""

import os
import subprocess
import sys

import dorad
import pytest
from lib.partitions import Partitions
from lib.server import wait_until
from lib.zygote import Program

STRANGER = 1


@pytest.fixture
def links(server):
    partitions = Partitions(30e6)
    target = partitions.listen()
    partitions.forward(target, server.target)
    yield partitions, target
    partitions.end()


def serves(client):
    try:
        return client.health(timeout=1) == "serving"
    except dorad.DoradError:
        return False


@pytest.mark.parametrize("silent", [True, False])
def test_a_process_is_cut_off_and_others_are_not(links, silent):
    partitions, target = links
    with dorad.Client(target, timeout=20, retry_for=0) as client:
        assert client.health() == "serving"
        assert partitions.cut(STRANGER, target, silent) == 0
        assert client.health() == "serving"
        assert partitions.cut(os.getpid(), target, silent) > 0
        assert not serves(client)
        with dorad.Client(target, retry_for=0) as late:
            assert not serves(late)
        code = "import sys, dorad; print(dorad.Client(sys.argv[1], timeout=20).health())"
        other = Program([sys.executable, "-c", code, target], stdout=subprocess.PIPE)
        assert other.stdout.read() == "serving\n" and other.wait(30) == 0
        partitions.mend()
        wait_until(lambda: serves(client), 30)
