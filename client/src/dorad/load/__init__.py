"""`dorad-load`: drives a server with many requests and reports latencies and throughput.

Closed loop keeps a fixed number of requests in flight; open loop sends them at the arrival times of
a Poisson process whether or not earlier ones have been answered. Open-loop latencies count from the
planned arrival, so a server that falls behind cannot hide it. The report also tells what the
generator itself took, and whether it was the one that fell behind.
"""

from dorad.load.drive import Counts, Show, run
from dorad.load.plan import Goals, Lengths, Plan, Popularity
from dorad.load.processes import run_processes

__all__ = ["Counts", "Goals", "Lengths", "Plan", "Popularity", "Show", "run", "run_processes"]
