"""Token ids, numbers and tensors as bytes, written independently of the client."""

import json
import struct

import numpy as np


def ids(data):
    return np.frombuffer(data, "<i4").tolist()


def pack_ints(values):
    return np.asarray(values, "<i4").tobytes()


def pack_floats(values):
    return np.asarray(values, "<f4").tobytes()


def image_of(tensors):
    """A safetensors image of {name: float32 array}, written independently of the client."""
    header, data = {}, b""
    for name, array in tensors.items():
        raw = np.asarray(array, "<f4").tobytes()
        span = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "F32", "shape": list(np.shape(array)), "data_offsets": span}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
