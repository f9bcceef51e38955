"""`dorad-load`: sends many requests to a server and reports latencies and throughput.

The closed loop keeps a fixed number of requests in flight. The open loop sends requests at the
arrival times of a Poisson process, without waiting for answers. Its latencies count from the
planned arrival, so they include the delay of a server that falls behind. The report also has the
generator's own CPU time, and says whether the generator was the bottleneck.
"""

from dorad.load.chart import page
from dorad.load.data import Sample, read_samples
from dorad.load.drive import Counts, Show, run
from dorad.load.openai import OpenAI
from dorad.load.plan import Goals, Lengths, Plan, Popularity
from dorad.load.processes import run_processes
from dorad.load.target import Grpc, Target, Vocabulary

__all__ = [
    "Counts",
    "Goals",
    "Grpc",
    "Lengths",
    "OpenAI",
    "Plan",
    "Popularity",
    "Sample",
    "Show",
    "Target",
    "Vocabulary",
    "page",
    "read_samples",
    "run",
    "run_processes",
]
