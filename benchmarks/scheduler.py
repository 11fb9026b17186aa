"""Cost of a scheduling step with many requests waiting, for each batching policy.

    python benchmarks/scheduler.py

Each step takes one batch of 32 from ``n`` waiting requests and 32 new ones arrive; nobody is overdue. Microseconds a
step, best of five rounds.
"""

from __future__ import annotations

import random
import time

from oasr_core.registry import registry
from oasr_core.request import DecodingOptions, Request
from oasr_core.scheduling.options import BatchingOptions
from oasr_core.scheduling.partition import CountPartition
from oasr_core.scheduling.scheduler import Scheduler

STEPS = 50


def step_cost(policy: str, waiting: int, streaming: bool = False) -> float:
    """Microseconds of one ``schedule()`` with its 32 admissions."""
    generator = random.Random(0)
    options = BatchingOptions(max_wait_time=1e9)
    best = float("inf")
    for turn in range(5):
        scheduler = Scheduler(options, registry("batching_policies").get(policy)(), CountPartition())

        def add(count: int, turn=turn, scheduler=scheduler) -> None:
            for _ in range(count):
                cost = generator.randrange(50, 3000)
                name = f"{turn}-{generator.getrandbits(64)}"
                scheduler.add(Request(name, streaming, DecodingOptions(), num_frames=cost, cost=cost))

        add(waiting)
        begun = time.perf_counter()
        for _ in range(STEPS):
            add(32)
            output = scheduler.schedule()
            for request in [*output.offline_batch, *output.newly_admitted]:
                scheduler.finish_request(request.request_id)
        best = min(best, (time.perf_counter() - begun) / STEPS)
    return best * 1e6


def main() -> None:
    """Print the table."""
    sizes = (10, 1_000, 100_000)
    header = " ".join(f"{n:>9} waiting" for n in sizes)
    print(f"{'policy':18} {header}   (microseconds a step, 32 arrivals included)")
    for policy in registry("batching_policies").names():
        print(f"{policy:18} " + " ".join(f"{step_cost(policy, n):17.0f}" for n in sizes), flush=True)
    print(f"{'streams':18} " + " ".join(f"{step_cost('fcfs', n, streaming=True):17.0f}" for n in sizes))


if __name__ == "__main__":
    main()
