"""The files of a folder that a request names."""

import os

from dorad.gateway.rl.folder import opened


def test_a_stream_that_outlives_the_call_reads_the_same_file(zoo, tmp_path):
    """gRPC goes on reading after a refusal, when the descriptor's number may be another file's."""
    source = zoo.adapter("llama2", "dora")
    expected = (source / "adapter_model.safetensors").read_bytes()
    with opened(str(source), [source.parent]) as folder:
        _, image = folder.contents()
        pieces = image.pieces()
        first = bytes(next(pieces))
    others = [os.open(source / "adapter_config.json", os.O_RDONLY) for _ in range(8)]
    try:
        assert b"".join([first, *map(bytes, pieces)]) == expected
        assert b"".join(map(bytes, image.pieces())) == expected
    finally:
        for descriptor in others:
            os.close(descriptor)


def test_a_file_is_closed_when_nobody_has_it(zoo):
    source = zoo.adapter("llama2", "dora")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with opened(str(source), [source.parent]) as folder:
            assert folder.contents()[1].size > 0
    del folder
    assert len(os.listdir("/proc/self/fd")) == before
