"""``ctc_aed_rescoring``: the fusion on scripted decoders, WeNet's results from its encoder outputs and from wavs."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from oasr_core.checkpoints.load import load_model
from oasr_core.checkpoints.resolve import resolve_checkpoint
from oasr_core.config import EngineConfig
from oasr_core.decoding.base import DecodeContext, DecodeStrategy, Hypotheses, Hypothesis
from oasr_core.engine import ASREngine
from oasr_core.errors import ConfigError, PluginContractError, RequestRefusedError
from oasr_core.metrics import ErrorCounts, count_errors
from oasr_core.models.base import EncoderOutput
from oasr_core.request import DecodingOptions
from oasr_core.testing.decoding import ByteTokenizer, Run, scripted_output
from oasr_ctc import rescoring as module
from oasr_ctc.greedy import InvalidLogProbsError
from oasr_ctc.options import CtcOptions
from oasr_ctc.rescoring import CtcAedRescoringOptions, CtcAedRescoringStrategy, score_hypotheses

SOS, EOS = 8, 9


class StoredNbest(DecodeStrategy):
    """Stands for the CTC search: row ``i`` of the micro-batch gets ``lists[i]``."""

    oasr_api = "1.0"
    lists: tuple[tuple[tuple[tuple[int, ...], float], ...], ...] = ()

    def validate(self, options, mode):
        self.validated = options

    def decode_offline(self, out, options):
        self.asked = [wanted.n_best for wanted in options]
        rows = [[Hypothesis(list(t), list(range(len(t))), [-0.1] * len(t), s) for t, s in row] for row in self.lists]
        return [Hypotheses(row, trailing_silence_frames=3) for row in rows]


class ScriptedDecoders:
    """Log posterior of a token: ``-token / 10``, right to left twice that, plus the mean of ``hidden``."""

    sos_id, eos_id, reverse_weight = SOS, EOS, 0.3

    def __init__(self) -> None:
        self.calls: list[tuple[bool, torch.Tensor, torch.Tensor]] = []

    def score(self, hidden, lengths, hyps, hyp_lengths, *, reverse):
        assert (hyps[:, 0] == SOS).all()
        self.calls.append((reverse, hyps, hyp_lengths))
        per_token = torch.arange(10) * (-0.2 if reverse else -0.1)
        heard = hidden[:, :, 0].sum(dim=1) / lengths
        return (per_token + heard[:, None, None]).expand(*hyps.shape, 10).contiguous()


def hidden_of(*rows: float, frames: int = 4, padding: float = math.nan) -> tuple[torch.Tensor, torch.Tensor]:
    """Row ``i`` has ``frames + i`` frames of its value."""
    lengths = torch.arange(len(rows)) + frames
    hidden = torch.full((len(rows), int(lengths.max()), 2), padding)
    for row, value in enumerate(rows):
        hidden[row, : lengths[row]] = value
    return hidden, lengths


@pytest.fixture
def build(monkeypatch):
    """``build(*lists, decoders=None, **options)`` gives a strategy whose CTC search finds ``lists``."""

    def make(*lists, decoders=None, **options):
        stored = type("Stored", (StoredNbest,), {"lists": lists})
        monkeypatch.setattr(module, "CtcStrategy", stored)
        interfaces = {"ctc": SimpleNamespace(blank_id=0, vocab_size=10), "aed_scorer": decoders or ScriptedDecoders()}
        context = DecodeContext(
            SimpleNamespace(interfaces=interfaces), ByteTokenizer(), CtcAedRescoringOptions(**options)
        )
        return CtcAedRescoringStrategy(context)

    return make


def decode(strategy, *values: float, n_best: int = 1):
    hidden, lengths = hidden_of(*values)
    return strategy.decode_offline(EncoderOutput(hidden, lengths), [DecodingOptions(n_best=n_best)] * len(values))


# --- the fusion, on scripted decoders -------------------------------------------------------------------------------


def test_scores_are_fused_as_written(build):
    strategy = build((((2, 3), -1.0), ((1,), -1.5), ((), -2.0)))
    nbest = decode(strategy, -0.5)[0].nbest
    # (2, 3): l = -.2 -.3 -.9 - 3 * .5, r = -.4 -.6 -1.8 - 3 * .5; and so on for the others
    want = {
        (2, 3): 0.7 * -2.9 + 0.3 * -4.3 - 0.5,
        (1,): 0.7 * -2.0 + 0.3 * -3.0 - 0.75,
        (): 0.7 * -1.4 + 0.3 * -2.3 - 1.0,
    }
    assert [tuple(hyp.tokens) for hyp in nbest] == sorted(want, key=lambda tokens: -want[tokens])
    assert {tuple(hyp.tokens): hyp.score for hyp in nbest} == pytest.approx(want)


def test_token_posteriors_are_the_mean_of_both_directions_and_frames_those_of_ctc(build):
    hyps = decode(build((((2, 3), -1.0),)), -0.5)[0]
    want = [math.exp(-0.7) + math.exp(-0.9), math.exp(-0.8) + math.exp(-1.1)]
    assert [2 * math.exp(log_prob) for log_prob in hyps.best.token_log_probs] == pytest.approx(want)
    assert hyps.best.frames == [0, 1]
    assert hyps.trailing_silence_frames == 3


def test_right_decoder_reads_backwards_and_eos_pads(build):
    decoders = ScriptedDecoders()
    decode(build((((2, 3, 4), -1.0), ((5,), -1.5)), decoders=decoders), 0.0)
    (left, left_in, lengths), (right, right_in, _) = decoders.calls
    assert (left, right) == (False, True)
    assert left_in.tolist() == [[SOS, 2, 3, 4], [SOS, 5, EOS, EOS]]
    assert right_in.tolist() == [[SOS, 4, 3, 2], [SOS, 5, EOS, EOS]]
    assert lengths.tolist() == [4, 2]


def test_one_pass_a_direction_for_all_rows_and_each_row_is_its_own(build):
    lists = ((((2,), -1.0), ((3, 1), -1.5)), (((4,), -0.5),), (((), -0.1), ((1, 2, 3), -3.0)))
    decoders = ScriptedDecoders()
    together = decode(build(*lists, decoders=decoders), -0.1, -0.2, -0.3)
    assert [len(call[1]) for call in decoders.calls] == [5, 5]
    for row, value in enumerate((-0.1, -0.2, -0.3)):
        alone = decode(build(lists[row]), value)[0]
        assert [hyp.tokens for hyp in together[row].nbest] == [hyp.tokens for hyp in alone.nbest]
        for one, many in zip(alone.nbest, together[row].nbest, strict=True):
            assert many.score == pytest.approx(one.score, abs=1e-5)
            assert many.token_log_probs == pytest.approx(one.token_log_probs, abs=1e-6)


def test_very_long_lists_are_scored_in_several_passes(build, monkeypatch):
    lists = (tuple(((token,) * (1 + token % 4), -float(token)) for token in range(1, 8)),)
    whole = decode(build(*lists), -0.1)
    monkeypatch.setattr(module, "MAX_LOG_PROBS", 5 * 10 * 2)  # two hypotheses of five steps
    decoders = ScriptedDecoders()
    assert decode(build(*lists, decoders=decoders), -0.1) == whole
    assert [len(call[1]) for call in decoders.calls] == [2, 2, 2, 1] * 2


def test_equal_scores_keep_the_order_of_ctc(build):
    # the decoders see the same posteriors in either order of two tokens
    lists = (((4, 4), -1.0), ((3, 2), -1.0), ((2, 3), -1.0))
    nbest = decode(build(lists, ctc_weight=0.0), 0.0)[0].nbest
    assert nbest[0].score == nbest[1].score
    assert [hyp.tokens for hyp in nbest] == [[3, 2], [2, 3], [4, 4]]
    nbest = decode(build((lists[0], lists[2], lists[1])), 0.0)[0].nbest
    assert [hyp.tokens for hyp in nbest] == [[2, 3], [3, 2], [4, 4]]


def test_without_the_right_decoder(build):
    decoders = ScriptedDecoders()
    hyp = decode(build((((2, 3), -1.0),), decoders=decoders, reverse_weight=0.0), -0.5)[0].best
    assert [call[0] for call in decoders.calls] == [False]
    assert hyp.score == pytest.approx(-2.9 - 0.5)
    assert hyp.token_log_probs == pytest.approx([-0.7, -0.8])


def test_weights(build):
    hyp = decode(build((((2, 3), -1.0),), reverse_weight=1.0, ctc_weight=2.0), -0.5)[0].best
    assert hyp.score == pytest.approx(-4.3 - 2.0)
    hyp = decode(build((((2, 3), -math.inf),), ctc_weight=0.0), -0.5)[0].best
    assert hyp.score == pytest.approx(0.7 * -2.9 + 0.3 * -4.3)


def test_empty_hypotheses_can_be_demoted(build):
    lists = (((), -0.1), ((5, 5), -9.0), ((6,), -9.0))
    assert decode(build(lists), 0.0)[0].best.tokens == []
    demoted = decode(build(lists, demote_empty_hyps=True), 0.0)[0].nbest
    assert [hyp.tokens for hyp in demoted] == [[6], [5, 5], []]
    assert decode(build((((), -0.1),), demote_empty_hyps=True), 0.0)[0].best.tokens == []


def test_nbest_limits_what_is_asked_for_and_scored(build):
    lists = tuple(((token,), -float(token)) for token in range(1, 6))
    strategy = build(lists, beam_size=5, nbest=2)
    hyps = decode(strategy, 0.0)[0]
    assert strategy._ctc.asked == [2]
    assert [hyp.tokens for hyp in hyps.nbest] == [[1], [2]]
    everything = build(lists, beam_size=5)
    assert len(decode(everything, 0.0)[0].nbest) == 5
    assert everything._ctc.asked == [5]


def test_nan_of_a_decoder_names_the_row(build):
    strategy = build((((1,), -1.0),), (((2,), -1.0),))
    with pytest.raises(InvalidLogProbsError, match="batch row 1 are NaN") as caught:
        decode(strategy, 0.0, math.nan)
    assert caught.value.rows == (1,)


def test_impossible_tokens_rank_last(build):
    class Certain(ScriptedDecoders):
        def score(self, hidden, lengths, hyps, hyp_lengths, *, reverse):
            scores = super().score(hidden, lengths, hyps, hyp_lengths, reverse=reverse)
            scores[:, :, 3] = -math.inf
            return scores

    nbest = decode(build((((3,), -0.1), ((2,), -5.0)), decoders=Certain()), 0.0)[0].nbest
    assert [hyp.tokens for hyp in nbest] == [[2], [3]]
    assert nbest[1].score == nbest[1].token_log_probs[0] == -math.inf


# --- what is refused ------------------------------------------------------------------------------------------------


def test_streams_are_refused_by_name(build):
    with pytest.raises(RequestRefusedError, match="'ctc_aed_rescoring' refuses streams"):
        build().validate(DecodingOptions(), "streaming")
    assert CtcAedRescoringStrategy.modes == ("offline",)


def test_more_hypotheses_than_are_scored_are_refused(build):
    strategy = build(beam_size=4, nbest=3)
    strategy.validate(DecodingOptions(n_best=3), "offline")
    assert strategy._ctc.validated.n_best == 3
    with pytest.raises(RequestRefusedError, match="3 hypotheses are scored"):
        strategy.validate(DecodingOptions(n_best=4), "offline")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_size": 4, "nbest": 5}, "the search keeps beam_size=4"),
        ({"reverse_weight": 0.3}, "has no trained right-to-left decoder"),
    ],
)
def test_contradictions_are_refused(build, options, message):
    decoders = ScriptedDecoders()
    decoders.reverse_weight = 0.0
    with pytest.raises(ConfigError, match=message):
        build(decoders=decoders, **options)
    assert build(decoders=decoders).reverse_weight == 0.0


@pytest.mark.parametrize(
    "option",
    [
        {"ctc_weight": -0.1},
        {"ctc_weight": math.inf},
        {"reverse_weight": 1.1},
        {"nbest": 0},
        {"search": "greedy"},
        {"beta": 1},
    ],
    ids=str,
)
def test_options_are_checked(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        CtcAedRescoringOptions(**option)


def test_foreign_options_are_refused():
    interfaces = {"ctc": SimpleNamespace(blank_id=0, vocab_size=10), "aed_scorer": ScriptedDecoders()}
    with pytest.raises(PluginContractError, match="it takes CtcAedRescoringOptions"):
        CtcAedRescoringStrategy(DecodeContext(SimpleNamespace(interfaces=interfaces), ByteTokenizer(), CtcOptions()))


# --- the search of oasr-ctc in front --------------------------------------------------------------------------------


def test_ctc_search_and_decoders_together():
    interfaces = {"ctc": SimpleNamespace(blank_id=0, vocab_size=10), "aed_scorer": ScriptedDecoders()}
    strategy = CtcAedRescoringStrategy(DecodeContext(SimpleNamespace(interfaces=interfaces), ByteTokenizer()))
    # CTC prefers 7, the decoders like small ids more than CTC dislikes 1
    out = scripted_output([[Run(0, 2), Run(7, 3, 0.6), Run(0)], [Run(0, 4)]], 10)
    first, silent = strategy.decode_offline(out, [DecodingOptions(n_best=10)] * 2)
    assert len(first.nbest) == 10
    assert first.nbest == sorted(first.nbest, key=lambda hyp: -hyp.score)
    assert all(len(hyp.frames) == len(hyp.token_log_probs) == len(hyp.tokens) for hyp in first.nbest)
    assert silent.best.tokens == []


# --- WeNet ----------------------------------------------------------------------------------------------------------


#: WeNet considers the ten best labels of every frame.
WENET = {"beam_size": 10, "first_beam_size": 10, "blank_threshold": 1.0}


@pytest.fixture(scope="module")
def oracle(wenet_digits):
    return json.loads((wenet_digits / "oracle" / "decode_results.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model(wenet_digits):
    model, _ = load_model(resolve_checkpoint(wenet_digits))
    model.eval().requires_grad_(False)
    model.prepare()
    return model


@pytest.fixture(scope="module")
def encoded(wenet_digits):
    """WeNet's own encoder outputs as one micro-batch with NaN for padding: names, output."""
    tensors = load_file(wenet_digits / "oracle" / "offline.safetensors")
    names = sorted(key.removesuffix(".encoder_out") for key in tensors if key.endswith(".encoder_out"))
    assert len(names) >= 7
    hidden, log_probs = (
        torch.nn.utils.rnn.pad_sequence(
            [tensors[f"{name}.{kind}"] for name in names], batch_first=True, padding_value=math.nan
        )
        for kind in ("encoder_out", "ctc_log_probs")
    )
    lengths = torch.tensor([len(tensors[f"{name}.encoder_out"]) for name in names])
    return names, EncoderOutput(hidden, lengths, log_probs)


def test_both_decoders_score_wenets_lists_as_wenet_does(model, encoded, oracle):
    names, out = encoded
    stored = [oracle["utterances"][name]["offline"]["ctc_prefix_beam_search"]["nbest"] for name in names]
    lists = [[Hypothesis(hyp["tokens"], score=hyp["ctc_score"]) for hyp in nbest] for nbest in stored]
    scores = score_hypotheses(model.interfaces["aed_scorer"], 48, out.hidden, out.lengths, lists, reverse=True)
    for nbest, row in zip(stored, scores, strict=True):
        for want, got in zip(nbest, row, strict=True):
            assert got.left.sum() == pytest.approx(want["l2r_score"], abs=1e-3)
            assert got.right.sum() == pytest.approx(want["r2l_score"], abs=1e-3)


def test_decoder_outputs_are_wenets_token_by_token(model, encoded, wenet_digits):
    names, out = encoded
    tensors = load_file(wenet_digits / "oracle" / "decoder_rescoring.safetensors")
    checked = 0
    for row, name in enumerate(names):
        if f"{name}.hyps_in" not in tensors:
            continue
        lengths = tensors[f"{name}.hyps_in_lens"].tolist()
        tokens = [hyp[1:size] for hyp, size in zip(tensors[f"{name}.hyps_in"].tolist(), lengths, strict=True)]
        hidden, frames = out.hidden[row : row + 1], out.lengths[row : row + 1]
        lists = [[Hypothesis(hyp) for hyp in tokens]]
        scores = score_hypotheses(model.interfaces["aed_scorer"], 48, hidden, frames, lists, reverse=True)[0]
        for place, hyp in enumerate(tokens):
            left = tensors[f"{name}.l2r_log_probs"][place]
            right = tensors[f"{name}.r2l_log_probs"][place]
            want_left = [left[step, token].item() for step, token in enumerate([*hyp, 47])]
            want_right = [right[len(hyp) - 1 - step, token].item() for step, token in enumerate(hyp)]
            want_right.append(right[len(hyp), 47].item())
            assert scores[place].left.tolist() == pytest.approx(want_left, abs=1e-4)
            assert scores[place].right.tolist() == pytest.approx(want_right, abs=1e-4)
            checked += 1
    assert checked >= 10


def test_winners_from_wenets_encoder_outputs(model, encoded, oracle):
    names, out = encoded
    options = CtcAedRescoringOptions(**WENET)
    strategy = CtcAedRescoringStrategy(DecodeContext(model, ByteTokenizer(), options))
    assert strategy.reverse_weight == pytest.approx(0.3)
    hyps = strategy.decode_offline(out, [DecodingOptions(n_best=10)] * len(names))
    for name, got in zip(names, hyps, strict=True):
        stored = oracle["utterances"][name]["offline"]
        want = stored["attention_rescoring"]
        assert got.best.tokens == want["tokens"], name
        assert got.best.score == pytest.approx(want["score"], abs=1e-3)
        confidences = [math.exp(log_prob) for log_prob in got.best.token_log_probs]
        assert confidences == pytest.approx(want["tokens_confidence"], abs=1e-3)
        everything = {tuple(hyp["tokens"]): hyp["rescore"] for hyp in stored["ctc_prefix_beam_search"]["nbest"]}
        assert {tuple(hyp.tokens): hyp.score for hyp in got.nbest} == pytest.approx(everything, abs=1e-3)


@pytest.fixture(scope="module")
def engine(wenet_digits):
    settings = {"ckpt_dir": str(wenet_digits), "device": "cpu", "dtype": "float32", "service_mode": "offline"}
    config = EngineConfig(decode_method="ctc_aed_rescoring", decode_options=WENET, max_batch_size=8, **settings)
    with ASREngine(config) as engine:
        yield engine


@pytest.fixture(scope="module")
def outputs(engine, oracle, wenet_digits):
    wavs = [wenet_digits / "test_wavs" / f"{name}.wav" for name in oracle["utterances"]]
    decoding = DecodingOptions(word_timestamps=True, n_best=10)
    return dict(zip(oracle["utterances"], engine.transcribe_outputs(wavs, decoding=decoding), strict=True))


def test_all_recordings_equal_wenet(outputs, oracle):
    assert len(outputs) == 20
    for name, got in outputs.items():
        want = oracle["utterances"][name]["offline"]["attention_rescoring"]
        assert got.finish_reason == "stop", got.error
        assert (got.text, got.tokens[0]) == (want["text"], want["tokens"]), name
        assert got.scores[0] == pytest.approx(want["score"], abs=5e-3)
        assert got.scores == sorted(got.scores, reverse=True)
        mean = sum(want["tokens_confidence"]) / len(want["tokens_confidence"])
        assert got.confidence == pytest.approx(mean, abs=1e-3)


def test_error_rate_equals_wenets(outputs, oracle):
    total = sum(
        (count_errors(oracle["reference"][name].split(), got.text.split()) for name, got in outputs.items()),
        ErrorCounts(),
    )
    assert total.reference == 108
    assert 100 * total.rate == pytest.approx(oracle["wer"]["test20"]["offline"]["attention_rescoring"], abs=0.005)


def test_words_of_the_winner_are_timed(outputs, oracle):
    for name, got in outputs.items():
        assert [word.word for word in got.words] == got.text.split()
        starts = [word.start for word in got.words]
        assert starts == sorted(starts)
        # WeNet's times are the last frames of the tokens' runs, in frames of 40 ms
        last_frames = oracle["utterances"][name]["offline"]["attention_rescoring"]["times"]
        for start, frame in zip(got.timestamps, last_frames, strict=True):
            assert 0.04 * frame - 0.5 < start <= 0.04 * frame + 1e-6


def test_alone_and_in_company_are_equal(engine, outputs, wenet_digits):
    for name in ("utt00_1d", "utt04_2d", "utt09_4d", "utt18_17d"):
        decoding = DecodingOptions(word_timestamps=True, n_best=10)
        alone = engine.transcribe_outputs(wenet_digits / "test_wavs" / f"{name}.wav", decoding=decoding)[0]
        company = outputs[name]
        assert (alone.text, alone.tokens, alone.timestamps) == (company.text, company.tokens, company.timestamps)
        assert alone.scores == pytest.approx(company.scores, abs=1e-3)
        assert alone.confidence == pytest.approx(company.confidence, abs=1e-4)


def test_hotwords_reach_the_search(engine, wenet_digits):
    wav = wenet_digits / "test_wavs" / "utt00_1d.wav"
    plain, boosted = (
        engine.transcribe_outputs(wav, decoding=DecodingOptions(n_best=10, hotwords=hotwords))[0]
        for hotwords in ((), ({"phrase": "NINE", "boost": 10.0}, "qqq"))
    )
    assert not any("NINE" in text for text in plain.nbest_texts)
    assert any("NINE" in text for text in boosted.nbest_texts)
    assert boosted.unencoded_hotwords == ["qqq"]
    assert boosted.text == plain.text == "THREE"  # what was said stays the best


def test_streaming_service_is_refused_by_name(wenet_digits):
    config = EngineConfig(
        ckpt_dir=str(wenet_digits), decode_method="ctc_aed_rescoring", service_mode="streaming", device="cpu"
    )
    with pytest.raises(ConfigError, match="'ctc_aed_rescoring' is offline only"):
        ASREngine(config)


def test_a_model_without_decoders_is_refused(wenet_digits, monkeypatch):
    from oasr_core import construction

    def without(bundle):
        model, report = load_model(bundle)
        model._interfaces.pop("aed_scorer")
        return model, report

    monkeypatch.setattr(construction, "load_model", without)
    config = EngineConfig(ckpt_dir=str(wenet_digits), decode_method="ctc_aed_rescoring", device="cpu")
    with pytest.raises(ConfigError, match="requires the interface aed_scorer"):
        ASREngine(config)
