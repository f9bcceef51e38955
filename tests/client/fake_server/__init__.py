"""A dorad server without a model: the wire contract with deterministic tokens, in this process.

Token t of sample i of a prompt is (sum of the prompt + 10·i + t) mod VOCAB, its log-probability
-(token + 1) / 100. Tests steer it by its public attributes.
"""

from .encoding import image_of
from .errors import connection_lost, fail, overloaded, shutting_down, unavailable
from .server import FakeServer

__all__ = [
    "FakeServer",
    "connection_lost",
    "fail",
    "image_of",
    "overloaded",
    "shutting_down",
    "unavailable",
]
