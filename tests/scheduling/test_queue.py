"""The waiting pool against a plain list."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_core.request import DecodingOptions, Request
from oasr_core.scheduling.queue import WaitingQueue

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(-1, 2), st.integers(1, 5)),
        st.tuples(st.just("remove"), st.integers(0, 50), st.just(0)),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(actions=ACTIONS, shortest=st.booleans())
def test_order_age_and_membership(actions, shortest):
    queue, model = WaitingQueue(shortest_first=shortest), []
    for arrival, (action, value, cost) in enumerate(actions):
        if action == "add":
            request = Request(str(arrival), False, DecodingOptions(), value, cost=cost, arrival=arrival)
            request.arrival_time = float(arrival)
            queue.add(request)
            model.append(request)
        elif model:
            gone = model.pop(value % len(model))
            queue.remove(gone)
            assert gone not in queue
        in_order = sorted(model, key=lambda r: (r.priority, r.arrival))
        assert list(queue) == in_order
        wanted = sorted(model, key=lambda r: (r.priority, r.cost, r.arrival)) if shortest else in_order
        assert list(queue.candidates()) == wanted
        assert len(queue) == len(model)
        assert queue.oldest_arrival() == (model[0].arrival_time if model else None)
        assert list(queue.overdue(arrival / 2)) == [r for r in model if r.arrival_time <= arrival / 2]
