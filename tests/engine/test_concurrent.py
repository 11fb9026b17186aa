"""Many threads on one engine: one lock, one terminal output per request, each to its one consumer."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from oasr_core.errors import UnknownRequestError
from oasr_core.testing.markers import marker_audio, spell

pytestmark = pytest.mark.concurrent

THREADS = 16


def in_threads(function, count=THREADS):
    """Run ``function(i)`` in ``count`` threads that start together; the first exception is raised."""
    barrier = threading.Barrier(count)

    def start(i):
        barrier.wait()
        return function(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(start, range(count)))


def test_sixteen_threads_open_streams(engine):
    ids = in_threads(lambda i: [engine.add_streaming_request() for _ in range(20)])
    flat = [request_id for batch in ids for request_id in batch]
    assert len(set(flat)) == THREADS * 20
    assert engine.num_waiting == THREADS * 20
    for request_id in flat:
        engine.abort_request(request_id)
    assert Counter(output.request_id for output in engine.run()) == Counter(flat)


def test_transcribe_in_threads_gives_each_its_own(engine):
    def work(i):
        generator = random.Random(i)
        for _ in range(6):
            tokens = [generator.randrange(16) for _ in range(generator.randrange(1, 30))]
            assert engine.transcribe(marker_audio(tokens), streaming=bool(generator.randrange(2))) == spell(tokens)
        return True

    assert all(in_threads(work))
    assert not engine.has_work
    assert engine.step() == []


def test_feeders_race_aborters(engine):
    """Feeding an id that another thread has just aborted is a KeyError; every request ends exactly once."""
    tokens = [1 + i % 15 for i in range(24)]
    audio = marker_audio(tokens)
    ids = [engine.add_streaming_request() for _ in range(40)]
    stop = threading.Event()
    outputs = []

    def step():
        while not stop.is_set() or engine.has_work:
            outputs.extend(engine.step())

    stepper = threading.Thread(target=step)
    stepper.start()

    def work(i):
        generator = random.Random(i)
        for place, request_id in enumerate(ids):
            if i % 2 == 0 and place % (THREADS // 2) == i // 2:  # each stream has one feeder
                for start in range(0, len(audio), 1111):
                    try:
                        engine.feed_chunk(request_id, audio[start : start + 1111], is_last=start + 1111 >= len(audio))
                    except UnknownRequestError:
                        break
            elif i % 2 and generator.random() < 0.1:
                with contextlib.suppress(UnknownRequestError):
                    engine.abort_request(request_id)
        return True

    assert all(in_threads(work))
    stop.set()
    stepper.join(timeout=60)
    assert not stepper.is_alive()
    ends = Counter(output.request_id for output in outputs if output.finished)
    assert ends == Counter(ids)
    for output in outputs:
        if output.finish_reason == "stop":
            assert output.text == spell(tokens)
    assert engine._parts.runner.backend.store.num_streams == 0


def test_readers_of_the_queue_depths(engine):
    done = threading.Event()

    def work(i):
        if i == 0:
            for _ in range(20):
                engine.transcribe(marker_audio([1, 2, 3]), streaming=True)
            done.set()
            return True
        seen = 0
        while not done.is_set():
            seen = max(seen, engine.num_running + engine.num_waiting)
        return seen <= 1

    assert all(in_threads(work, 4))


def test_two_threads_in_run_share_the_outputs(engine):
    ids = {engine.add_request(marker_audio([1 + i % 15] * 20), streaming=bool(i % 2)) for i in range(40)}
    collected = in_threads(lambda i: [output.request_id for output in engine.run()], 2)
    assert Counter(collected[0] + collected[1]) == Counter(ids)
