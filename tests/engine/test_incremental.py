"""Autoregressive requests in the engine: company changes no token, every end gives everything back."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from oasr_core.errors import CachePoolExhausted, RequestRefusedError, StreamClosedError
from oasr_core.request import DecodingOptions
from oasr_core.testing.autoregressive import VOCAB, word_audio, words

SCRIPT = [5, 0, 9, 17, 3, 0, 3, 44, 21, 8, 30, 2]
TEXT = words(SCRIPT)
AUDIO = word_audio(SCRIPT)
#: Long enough to be under way for many ticks of one step.
LONG = [1 + i % 50 for i in range(40)]


def clips(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 60, (count,), generator=generator).tolist()
    return [word_audio(torch.randint(0, VOCAB - 2, (n,), generator=generator).tolist()) for n in lengths]


def drain(engine):
    """All outputs until nothing is left, tick by tick."""
    outputs = []
    for _ in range(2000):
        if not engine.has_work:
            return outputs
        outputs += engine.step()
    raise AssertionError(f"{engine.num_running} requests run and {engine.num_waiting} wait without end")


def finals(outputs):
    found = {}
    for output in outputs:
        if output.finished:
            assert output.request_id not in found, "two terminal outputs"
            found[output.request_id] = output
    return found


WAYS = {
    "greedy": ({}, DecodingOptions()),
    "paged": ({"kv_storage": "paged"}, DecodingOptions()),
    "sampled": ({}, DecodingOptions(temperature=1.2, seed=11, top_k=20, top_p=0.9)),
    "beam": ({"beam_size": 3}, DecodingOptions()),
    "apart": ({"merge_groups": False}, DecodingOptions()),
}


@pytest.fixture(scope="module")
def audios():
    return clips(10)


@pytest.fixture
def attention(make_toy):
    def make(**settings):
        return make_toy(**{"decode_method": "toy_attention", "silence_gate": "off", **settings})

    return make


@pytest.mark.parametrize("way", WAYS)
def test_company_changes_no_token(attention, audios, assert_returned, way):
    """Alone, in batches, and joining at random ticks while neighbours end, are aborted, or are invalid."""
    options, decoding = WAYS[way]
    engine = attention(decode_options=options, decode_steps_per_tick=1)
    alone = [engine.transcribe_outputs([audio], decoding=decoding)[0] for audio in audios]
    assert [output.error for output in alone] == [None] * len(audios)
    assert len({len(output.tokens[0]) for output in alone}) > 1, "the clips should end at different steps"
    together = engine.transcribe_outputs(audios, decoding=decoding)
    for turn in range(2):
        rng = random.Random(turn)
        ids, outputs, victims = {}, [], []
        for place in rng.sample(range(len(audios)), len(audios)):
            ids[place] = engine.add_request(audios[place], decoding=decoding)
            if rng.random() < 0.5:
                victims.append(engine.add_request(rng.choice(audios), decoding=decoding))
            for _ in range(rng.randrange(4)):
                outputs += engine.step()
            if victims and rng.random() < 0.5 and engine._loop.lookup(victims[-1]) is not None:
                engine.abort_request(victims.pop())
        joined = finals(outputs + drain(engine))
        for place, want in enumerate(alone):
            for got in (together[place], joined[ids[place]]):
                assert got.tokens == want.tokens
                assert got.scores == pytest.approx(want.scores, rel=1e-4)
                assert (got.text, got.finish_reason) == (want.text, want.finish_reason)
    assert_returned(engine)


def test_dense_and_paged_give_the_same_and_beam_one_is_greedy(attention, audios):
    want = [output.tokens for output in attention().transcribe_outputs(audios)]
    assert [o.tokens for o in attention(decode_options={"kv_storage": "paged"}).transcribe_outputs(audios)] == want
    assert [o.tokens for o in attention(decode_options={"beam_size": 1}).transcribe_outputs(audios)] == want


def test_what_the_audio_spells(make_toy, assert_returned):
    engine = make_toy()
    assert engine.transcribe([AUDIO, word_audio([0, 7]), AUDIO]) == [TEXT, words([7]), TEXT]
    assert engine.transcribe(torch.zeros(0)) == ""
    assert engine.transcribe(torch.zeros(639)) == ""
    (output,) = engine.transcribe_outputs([AUDIO], decoding=DecodingOptions(word_timestamps=True))
    starts = [0.04 * frame for frame, token in enumerate(SCRIPT) if token]
    assert [word.start for word in output.words] == pytest.approx(starts)
    assert_returned(engine)


def test_partials_are_cumulative_and_the_final_is_last(make_toy):
    engine = make_toy(decode_steps_per_tick=2)
    request_id = engine.add_request(AUDIO)
    outputs = drain(engine)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert len(outputs) > 3
    assert {output.request_id for output in outputs} == {request_id}
    assert all(later.text.startswith(earlier.text) for earlier, later in pairwise(outputs))
    stable = [output.stable_prefix_chars for output in outputs]
    assert stable == sorted(stable)
    assert stable[0] > 0
    assert (outputs[-1].text, outputs[-1].finish_reason) == (TEXT, "stop")


def test_partials_of_sampling_are_stable_too_and_those_of_beams_are_not(attention):
    for options, decoding, stable in (
        ({}, DecodingOptions(temperature=1.0), True),
        ({"beam_size": 3}, DecodingOptions(), False),
    ):
        engine = attention(decode_options=options, decode_steps_per_tick=3)
        engine.add_request(clips(1, seed=3)[0], decoding=decoding)
        partials = [output for output in drain(engine) if not output.finished]
        assert partials
        assert any(output.stable_prefix_chars for output in partials) is stable


@pytest.mark.parametrize(("interval", "expected"), [(1, 5), (2, 2), (0, 0), (-1, 0)])
def test_partial_decode_interval(make_toy, interval, expected):
    engine = make_toy(partial_decode_interval=interval, decode_steps_per_tick=2)
    engine.add_request(word_audio(range(1, 12)))  # the first token with the prefill, two a tick, the end in the last
    outputs = drain(engine)
    assert sum(not output.finished for output in outputs) == expected
    assert outputs[-1].text == words(range(1, 12))


def test_finish_reasons(make_toy):
    engine = make_toy()
    (cut,) = engine.transcribe_outputs([AUDIO], decoding=DecodingOptions(max_new_tokens=4))
    assert (cut.finish_reason, cut.text) == ("length", words([5, 9, 17, 3]))
    (whole,) = engine.transcribe_outputs([AUDIO], decoding=DecodingOptions(max_new_tokens=11))
    assert (whole.finish_reason, whole.text) == ("stop", TEXT)


def test_options_that_the_family_does_not_honour_are_refused(make_toy, assert_returned):
    engine = make_toy()
    for options in ({"language": "en"}, {"n_best": 2}, {"extra": {"colour": 1}}):
        with pytest.raises(RequestRefusedError, match=next(iter(options)) if "extra" not in options else "colour"):
            engine.add_request(AUDIO, decoding=DecodingOptions(**options))
    with pytest.raises(RequestRefusedError, match="streaming requests are not served"):
        engine.add_streaming_request()
    assert_returned(engine)


def test_counts(make_toy, assert_returned):
    engine = make_toy(max_batch_size=2, decode_steps_per_tick=1)
    for _ in range(5):
        engine.add_request(AUDIO)
    assert (engine.num_running, engine.num_waiting, engine.has_work) == (0, 5, True)
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (2, 3)
    assert len(finals(drain(engine))) == 5
    assert_returned(engine)


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["dense", "paged"])
@pytest.mark.parametrize("where", ["queue", "backlog", "early", "flight"])
def test_an_abort_gives_one_terminal_output_and_everything_back(make_toy, assert_returned, storage, where):
    engine = make_toy(
        max_decode_slots=2 if where == "queue" else 4,
        max_batch_frames=40 if where == "backlog" else None,
        max_wait_time=0,
        decode_steps_per_tick=1,
        decode_options={"kv_storage": storage},
    )
    ids = [engine.add_request(word_audio(LONG)) for _ in range(4)]
    seen = engine.step()
    if where == "flight":
        seen += engine.step() + engine.step() + engine.step()
    waiting = {"queue": (2, 2), "backlog": (4, 0)}.get(where, (4, 0))
    assert (engine.num_running, engine.num_waiting) == waiting
    if where == "backlog":
        assert len(engine._parts.incremental._live) == 1
    shown = {output.request_id: output.text for output in seen}
    engine.abort_request(ids[-1])
    outputs = finals(seen + drain(engine))
    assert set(outputs) == set(ids)
    assert outputs[ids[-1]].finish_reason == "abort"
    assert outputs[ids[-1]].text == shown.get(ids[-1], "")
    assert [outputs[request_id].text for request_id in ids[:-1]] == [words(LONG)] * 3
    if where == "flight":
        assert outputs[ids[-1]].text == words(LONG[:4])
    with pytest.raises(StreamClosedError):
        engine.abort_request(ids[-1])
    assert_returned(engine)


def test_close_ends_all_that_is_under_way(make_toy, assert_returned):
    engine = make_toy(max_decode_slots=2, decode_steps_per_tick=1, decode_options={"kv_storage": "paged"})
    for _ in range(4):
        engine.add_request(word_audio(LONG))
    engine.step()
    engine.step()
    engine.close()
    outputs = finals(engine.step())
    assert [output.finish_reason for output in outputs.values()] == ["abort"] * 4
    assert_returned(engine)


@pytest.mark.parametrize("storage", ["dense", "paged"])
def test_aborts_at_random_ticks(make_toy, assert_returned, storage):
    engine = make_toy(decode_steps_per_tick=1, decode_options={"kv_storage": storage}, max_batch_frames=60)
    rng, ids, outputs = random.Random(3), [], []
    for _ in range(120):
        if rng.random() < 0.5:
            ids.append(engine.add_request(word_audio(LONG[: rng.randrange(1, 30)])))
        if ids and rng.random() < 0.4:
            victim = rng.choice(ids)
            if engine._loop.lookup(victim) is not None:
                engine.abort_request(victim)
        outputs += engine.step()
    outputs += drain(engine)
    assert set(finals(outputs)) == set(ids)
    assert {output.finish_reason for output in finals(outputs).values()} == {"stop", "abort"}
    assert_returned(engine)


# -- failures --------------------------------------------------------------------------------------------------------


def holds(token):
    """Whether a decoder step carries the request whose audio spells ``token``."""
    return lambda tokens, state, memory: bool((memory[0] == token).any())


def inject(monkeypatch, target, name, error, hit=lambda *args, **kwargs: True):
    original = getattr(target, name)

    def broken(*args, **kwargs):
        if hit(*args, **kwargs):
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(target, name, broken)


BAD = [60, 1, 2, 3, 4, 5, 6, 7]

PREFILL = {
    "features": (lambda e: e._inputs, "extract", lambda waves: any(len(wave) == len(BAD) * 640 for wave in waves)),
    "forward": (lambda e: e._parts.runner, "forward_offline", lambda f, lengths, **_: len(BAD) in list(lengths)),
    "memory": (lambda e: e._parts.strategy.head, "memory", lambda hidden, lengths: bool((lengths == len(BAD)).any())),
    "prompt": (lambda e: e._parts.strategy, "rows", lambda requests, memory, frames: len(BAD) in frames),
    "step": (lambda e: e._parts.strategy.head, "step", holds(60)),
}


@pytest.mark.parametrize("storage", ["dense", "paged"])
@pytest.mark.parametrize("stage", PREFILL)
def test_a_prefill_failure_is_the_culprits_own(make_toy, assert_returned, monkeypatch, stage, storage):
    engine = make_toy(decode_steps_per_tick=1, decode_options={"kv_storage": storage})
    running = engine.add_request(word_audio(LONG))
    outputs = engine.step()
    owner, name, hit = PREFILL[stage]
    with monkeypatch.context() as patch:
        inject(patch, owner(engine), name, RuntimeError(stage), hit)
        good = [engine.add_request(AUDIO) for _ in range(2)]
        bad = engine.add_request(word_audio(BAD))
        outputs = finals(outputs + drain(engine))
    assert (outputs[bad].finish_reason, outputs[bad].error_stage) == ("error", "offline_forward")
    assert stage in outputs[bad].error
    assert [outputs[request_id].text for request_id in good] == [TEXT] * 2
    assert outputs[running].text == words(LONG)
    assert_returned(engine)


@pytest.mark.parametrize("error", [MemoryError("prefill"), CachePoolExhausted("none left")])
@pytest.mark.parametrize("stage", ["forward", "step"])
def test_memory_that_runs_out_in_prefill_is_not_retried(make_toy, assert_returned, monkeypatch, stage, error):
    engine = make_toy()
    calls = []
    owner, name, hit = PREFILL[stage]
    with monkeypatch.context() as patch:
        inject(patch, owner(engine), name, error, lambda *a, **k: hit(*a, **k) and not calls.append(1))
        for tokens in (BAD, SCRIPT):
            engine.add_request(word_audio(tokens))
        outputs = finals(drain(engine))
    assert {output.error_stage for output in outputs.values()} == {"prefill_oom"}
    assert len(calls) == 1
    assert engine.transcribe(AUDIO) == TEXT
    assert_returned(engine)


@pytest.mark.parametrize("storage", ["dense", "paged"])
@pytest.mark.parametrize(("error", "stage"), [(RuntimeError("kernel"), "decode_step"), (MemoryError(), "decode_oom")])
def test_a_failing_step_costs_its_group_only(make_toy, assert_returned, monkeypatch, storage, error, stage):
    """Rows that had finished keep their finals; other groups go on; what partials have shown is kept."""
    engine = make_toy(
        decode_steps_per_tick=1,
        max_batch_frames=8,
        decode_options={"kv_storage": storage, "merge_groups": False},
    )
    done = engine.add_request(word_audio([4]))
    bad = engine.add_request(word_audio(BAD))
    other = engine.add_request(word_audio(LONG))
    outputs = []
    while len(engine._parts.incremental._live) < 2 or not finals(outputs):
        outputs += engine.step()
    with monkeypatch.context() as patch:
        inject(patch, engine._parts.strategy.head, "step", error, holds(60))
        while bad not in finals(outputs):
            outputs += engine.step()
    outputs = finals(outputs + drain(engine))
    assert (outputs[bad].finish_reason, outputs[bad].error_stage) == ("error", stage)
    assert words(BAD).startswith(outputs[bad].text)
    assert outputs[bad].text
    assert (outputs[done].text, outputs[other].text) == (words([4]), words(LONG))
    assert_returned(engine)


def test_a_merged_group_fails_whole_and_later_requests_are_untouched(make_toy, assert_returned, monkeypatch):
    engine = make_toy(decode_steps_per_tick=1)
    ids = [engine.add_request(word_audio(tokens)) for tokens in (LONG, BAD)]
    outputs = engine.step() + engine.step()
    with monkeypatch.context() as patch:
        inject(patch, engine._parts.strategy.head, "step", RuntimeError("kernel"), holds(60))
        outputs += engine.step()
    assert {output.error_stage for output in finals(outputs).values()} == {"decode_step"}
    assert set(finals(outputs)) == set(ids)
    assert engine.transcribe(AUDIO) == TEXT
    assert_returned(engine)


@pytest.mark.parametrize("stage", ["finish", "numbers", "text"])
def test_a_rows_own_failure_leaves_its_group_alone(make_toy, assert_returned, monkeypatch, stage):
    engine = make_toy(decode_steps_per_tick=1)
    strategy = engine._parts.strategy
    with monkeypatch.context() as patch:
        if stage == "finish":
            inject(patch, strategy, "finish", RuntimeError(stage), lambda row, memory: row.frames == len(BAD))
        elif stage == "text":
            inject(patch, engine._parts.outputs, "final", RuntimeError(stage), lambda name, *_, **__: name == "bad")
        else:
            original = strategy.mask

            def poisoned(logits, pairs):
                original(logits, pairs)
                logits[[row.frames == len(BAD) for row, _ in pairs]] = torch.nan

            patch.setattr(strategy, "mask", poisoned)
        bad = engine.add_request(word_audio(BAD), request_id="bad")
        good = engine.add_request(word_audio(LONG))
        outputs = finals(drain(engine))
    assert (outputs[bad].finish_reason, outputs[bad].error_stage) == ("error", "decode_step")
    assert outputs[good].text == words(LONG)
    assert_returned(engine)


def test_a_strategy_that_raises_fails_what_it_holds(make_toy, assert_returned, monkeypatch):
    engine = make_toy(max_decode_slots=2, decode_steps_per_tick=1)
    ids = [engine.add_request(word_audio(LONG)) for _ in range(3)]
    outputs = engine.step()
    with monkeypatch.context() as patch:
        inject(patch, engine._parts.strategy, "advance", RuntimeError("protocol"))
        outputs += engine.step()
    assert set(finals(outputs)) == set(ids[:2])
    assert {output.error_stage for output in finals(outputs).values()} == {"decode_step"}
    assert finals(drain(engine))[ids[2]].text == words(LONG)
    assert_returned(engine)


@pytest.mark.parametrize("where", ["forward", "step", "text"])
def test_an_interrupt_ends_what_was_in_flight(make_toy, assert_returned, monkeypatch, where):
    """Ctrl-C in the prefill of a batch that waited behind another, or in the middle of a step."""
    engine = make_toy(decode_steps_per_tick=1, max_batch_frames=40, max_wait_time=0)
    ids = [engine.add_request(word_audio(LONG)) for _ in range(3)]
    outputs = engine.step()
    owner, name = {
        "forward": (engine._parts.runner, "forward_offline"),
        "step": (engine._parts.strategy.head, "step"),
        "text": (engine._parts.outputs, "open"),
    }[where]
    with monkeypatch.context() as patch:
        inject(patch, owner, name, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            outputs += drain(engine)
    outputs = finals(outputs + drain(engine))
    assert set(outputs) == set(ids)
    assert {output.finish_reason for output in outputs.values()} == {"error"}
    assert engine.transcribe(AUDIO) == TEXT
    assert_returned(engine)


def test_a_partition_that_raises_costs_its_batch(make_toy, assert_returned, monkeypatch):
    engine = make_toy()
    with monkeypatch.context() as patch:
        inject(patch, engine._parts.scheduler._partition, "split", RuntimeError("split"))
        (output,) = engine.transcribe_outputs([AUDIO])
    assert (output.finish_reason, output.error_stage) == ("error", "offline_forward")
    assert engine.transcribe(AUDIO) == TEXT
    assert_returned(engine)


def test_text_that_cannot_be_opened_costs_one_prefill(make_toy, assert_returned, monkeypatch):
    """The request is not left behind in the strategy."""
    engine = make_toy()
    with monkeypatch.context() as patch:
        inject(patch, engine._parts.outputs, "open", RuntimeError("open"))
        (output,) = engine.transcribe_outputs([AUDIO])
    assert (output.finish_reason, output.error_stage) == ("error", "offline_forward")
    assert_returned(engine)
    assert engine.transcribe(AUDIO) == TEXT


def test_a_cancel_that_fails_loses_nothing(make_toy, monkeypatch, caplog):
    engine = make_toy()
    with monkeypatch.context() as patch:
        inject(patch, engine._parts.strategy, "cancel", RuntimeError("cancel"))
        assert engine.transcribe([AUDIO] * 3) == [TEXT] * 3
    assert "cancelling" in caplog.text
    assert not engine.has_work
