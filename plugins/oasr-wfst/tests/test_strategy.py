"""The strategy: options, errors, hypotheses in words."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from oasr_core.decoding.base import DecodeContext, NoOptions, Session
from oasr_core.errors import ConfigError, PluginContractError, RequestRefusedError
from oasr_core.models.base import EncoderOutput
from oasr_core.registry import registry
from oasr_core.request import DecodingOptions
from oasr_core.testing.decoding import ByteTokenizer
from oasr_wfst import history, lattice_search, nbest, search
from oasr_wfst.errors import GraphError
from oasr_wfst.log_probs import InvalidLogProbsError
from oasr_wfst.options import CtcWfstOptions
from oasr_wfst.strategy import CtcWfstStrategy
from oasr_wfst.words import WordTable

DATA = Path(__file__).parent / "data"
PLAIN = DecodingOptions()


def build(name="HLG.pt", *, vocab_size=44, blank_id=0, **options):
    model = SimpleNamespace(interfaces={"ctc": SimpleNamespace(blank_id=blank_id, vocab_size=vocab_size)})
    options = {"fst_path": DATA / name, "words": DATA / "words.txt", **options}
    return CtcWfstStrategy(DecodeContext(model, ByteTokenizer(), CtcWfstOptions(**options)))


def test_a_graph_of_other_tokens_is_refused():
    with pytest.raises(ConfigError, match=r"HLG\.pt was built for other tokens"):
        build(tokens=DATA / "tokens.txt")


def batch(rows):
    lengths = torch.tensor([len(row) for row in rows])
    padded = torch.full((len(rows), max(lengths.tolist(), default=0), 44), math.nan)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = torch.from_numpy(row)
    return EncoderOutput(torch.zeros(1), lengths, padded)


def texts(strategy, hypotheses):
    return [strategy.output_tokenizer.decode(hyp.tokens) for hyp in hypotheses.nbest]


@pytest.fixture(scope="module")
def strategy():
    return build()


def test_requests_need_nothing_that_was_not_compiled_in_advance(strategy, digit_log_probs):
    """One machine code of each function serves the warm-up and all requests; another would keep a request waiting."""
    rows = [digit_log_probs["digits_03"], digit_log_probs["digits_04"]]
    strategy.decode_offline(batch(rows), [PLAIN, DecodingOptions(n_best=3)])
    session = strategy.open(DecodingOptions(n_best=2))
    strategy.decode_chunk([session], batch(rows[:1]), [False])
    strategy.current(session)
    called = {
        search: ("begin", "advance", "end", "ends"),
        history: ("path_to", "collect", "words_of", "last_speech"),
        lattice_search: ("add_emitting", "add_epsilons", "prune", "order_epsilons"),
        nbest: ("_pass_lists",),
    }
    counts = {name: len(getattr(module, name).signatures) for module, names in called.items() for name in names}
    assert {name: count for name, count in counts.items() if count > 1} == {}


def test_is_on_its_axis_with_every_option_described():
    assert registry("decode_strategies").get("ctc_wfst") is CtcWfstStrategy
    assert all(field.description for field in CtcWfstOptions.model_fields.values())
    defaults = CtcWfstOptions()
    assert (defaults.search_beam, defaults.output_beam) == (20.0, 8.0)
    assert (defaults.min_active_states, defaults.max_active_states) == (30, 10000)
    assert defaults.blank_threshold == 0.98


@pytest.mark.parametrize(
    "wrong",
    [
        {"search_beam": 0},
        {"output_beam": -1.0},
        {"min_active_states": 40, "max_active_states": 40},
        {"blank_threshold": 1.5},
        {"blank_threshold": 0.0},
        {"beam": 3},
        {"backend": "cuda"},
        {"search_beam": math.nan},
    ],
)
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(ValidationError):
        CtcWfstOptions(**wrong)


def test_a_graph_is_required():
    with pytest.raises(ConfigError, match="fst_path"):
        build(fst_path=None)
    model = SimpleNamespace(interfaces={"ctc": SimpleNamespace(blank_id=0, vocab_size=44)})
    with pytest.raises(ConfigError, match="fst_path"):
        CtcWfstStrategy(DecodeContext(model, ByteTokenizer(), NoOptions()))
    with pytest.raises(GraphError):
        build("nothing.img")


def test_graphs_that_do_not_fit_the_model_are_refused():
    with pytest.raises(ConfigError, match=r"labels up to 43 and the model has 40 outputs"):
        build(vocab_size=40)
    with pytest.raises(ConfigError, match="blank in column 0"):
        build(blank_id=43)
    with pytest.raises(ConfigError, match="words"):
        build(words=None)


def test_triton_is_refused_where_it_is_not_to_be_had():
    with pytest.raises(ConfigError, match="triton"):
        build(backend="triton")
    assert build(backend="cpu").decoder is not None


def test_foreign_options_sessions_and_outputs_are_refused(strategy, digit_log_probs):
    with pytest.raises(PluginContractError, match="CtcWfstOptions"):
        CtcWfstStrategy(DecodeContext(strategy.context.model, ByteTokenizer(), SimpleNamespace()))
    out = batch([digit_log_probs["digits_00"]])
    with pytest.raises(PluginContractError, match="opens its own"):
        strategy.decode_chunk([Session()], out, [True])
    with pytest.raises(PluginContractError, match="2 requests"):
        strategy.decode_offline(out, [PLAIN, PLAIN])
    with pytest.raises(PluginContractError, match="log_probs"):
        strategy.decode_offline(EncoderOutput(torch.zeros(1), out.lengths, None), [PLAIN])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_invalid_posteriors_are_refused_before_any_stream_changes(value, strategy, digit_log_probs):
    good, bad = digit_log_probs["digits_03"], digit_log_probs["digits_04"].copy()
    bad[17, 5] = value
    sessions = [strategy.open(PLAIN), strategy.open(PLAIN)]
    with pytest.raises(InvalidLogProbsError, match=r"row 1 .* frame 17;"):
        strategy.decode_chunk(sessions, batch([good, bad]), [False, False])
    hypotheses = strategy.decode_chunk(sessions, batch([good, good]), [True, True])
    assert [texts(strategy, each) for each in hypotheses] == [["FOUR FIVE NINE"]] * 2


def test_hypotheses_are_words_with_frames(strategy, digit_log_probs):
    found = strategy.decode_offline(batch([digit_log_probs["digits_03"], digit_log_probs["digits_00"]]), [PLAIN, PLAIN])
    assert [texts(strategy, each) for each in found] == [["FOUR FIVE NINE"], ["ONE"]]
    best = found[0].best
    assert len(best.tokens) == len(best.frames) == len(best.end_frames) == 3
    assert all(start < end for start, end in zip(best.frames, best.end_frames, strict=True))
    assert best.frames == sorted(best.frames)
    assert found[0].reached_final
    assert 0 < found[0].trailing_silence_frames < 59
    assert strategy.decode_offline(batch([]), []) == []


def test_no_audio_gives_no_words(strategy):
    (found,) = strategy.decode_offline(batch([np.empty((0, 44), np.float32)]), [PLAIN])
    assert found.best.tokens == []


def test_n_best(strategy, digit_log_probs):
    wide = build(output_beam=20.0, blank_threshold=1.0)
    options = [DecodingOptions(n_best=3), PLAIN]
    found = wide.decode_offline(batch([digit_log_probs["digits_05"]] * 2), options)
    assert texts(wide, found[0]) == ["THREE EIGHT SEVEN TWO", "NINE EIGHT SEVEN TWO", "THREE EIGHT SEVEN"]
    assert [hyp.score for hyp in found[0].nbest] == sorted((hyp.score for hyp in found[0].nbest), reverse=True)
    assert len(found[1].nbest) == 1
    assert found[1].best == found[0].best


def test_allow_partial(digit_log_probs):
    rows = digit_log_probs["digits_05"][:30]
    settings = {"search_beam": 2.0, "min_active_states": 0, "max_active_states": 10}
    partial = build("HLG_4digits.pt", **settings)
    (found,) = partial.decode_offline(batch([rows]), [PLAIN])
    if found.reached_final:
        assert len(found.best.tokens) == 4
    session = partial.open(PLAIN)
    (found,) = partial.decode_chunk([session], batch([rows]), [True])
    assert (texts(partial, found), found.reached_final) == (["THREE EIGHT"], False)
    strict = build("HLG_4digits.pt", allow_partial=False, **settings)
    session = strict.open(DecodingOptions(n_best=4))
    (so_far,) = strict.decode_chunk([session], batch([rows]), [False])
    assert texts(strict, so_far) == ["THREE EIGHT"]
    assert so_far.stable_tokens == 0
    found = strict.current(session)
    assert (found.best.tokens, found.best.frames, found.best.score) == ([], [], -math.inf)
    assert not found.reached_final
    assert found.trailing_silence_frames == 30


@pytest.mark.parametrize("chunk", [5, 16])
def test_streams_side_by_side(chunk, strategy, digit_log_probs):
    names = sorted(digit_log_probs)[:6]
    sessions = {name: strategy.open(DecodingOptions(n_best=2 if name > "digits_03" else 1)) for name in names}
    final, stable = {}, dict.fromkeys(names, 0)
    at = 0
    while sessions:
        here = list(sessions)
        rows = [digit_log_probs[name][at : at + chunk] for name in here]
        last = [at + chunk >= len(digit_log_probs[name]) for name in here]
        found = strategy.decode_chunk([sessions[name] for name in here], batch(rows), last)
        for name, hypotheses, ended in zip(here, found, last, strict=True):
            assert stable[name] <= hypotheses.stable_tokens <= len(hypotheses.best.tokens)
            stable[name] = hypotheses.stable_tokens
            if ended:
                final[name] = hypotheses
                assert strategy.current(sessions[name]) == hypotheses
                strategy.close(sessions.pop(name))
        at += chunk
    for name in names:
        (alone,) = strategy.decode_chunk(
            [strategy.open(DecodingOptions(n_best=2 if name > "digits_03" else 1))],
            batch([digit_log_probs[name]]),
            [True],
        )
        assert alone == final[name]


def test_words_as_a_vocabulary():
    symbols = ["<eps>", "AN", "APPLE", "<s>", "#0", "", "<UNK>"]
    table = WordTable(symbols)
    assert table.vocab_size == 7
    assert table.special_ids == {0, 3, 4, 5}
    assert table.decode([0, 1, 3, 2, 5, 6]) == "AN APPLE <UNK>"
    assert table.token_pieces([0, 1, 3, 2, 5, 6]) == ["", "AN", "", " APPLE", "", " <UNK>"]
    incremental = table.incremental()
    assert [incremental.push(ids) for ids in ([0], [1], [], [3, 2], [6])] == ["", "AN", "", " APPLE", " <UNK>"]
    assert incremental.flush() == ""
    assert WordTable(["", "今", "日"], "").decode([1, 2]) == "今日"
    with pytest.raises(RequestRefusedError):
        table.encode("AN")
    with pytest.raises(ConfigError, match="words"):
        WordTable.from_spec(SimpleNamespace())
