"""What each search serves, and how it refuses the rest."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from oasr_core.decoding.base import DecodeContext, StrategyOptions
from oasr_core.errors import ConfigError, PluginContractError, RequestRefusedError
from oasr_core.request import DecodingOptions
from oasr_core.testing.decoding import ByteTokenizer
from oasr_ctc.strategy import CtcStrategy


def test_defaults(make_strategy):
    assert make_strategy().context.options.model_dump() == {
        "search": "beam",
        "blank_id": None,
        "beam_size": 10,
        "blank_threshold": 0.98,
        "first_beam_size": None,
        "max_seq_len": None,
        "hotwords": (),
        "hotword_boost": 1.5,
        "strict_hotwords": False,
    }
    assert make_strategy(blank_id=3).blank_id == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [("beam_size", 10), ("blank_threshold", 0.98), ("max_seq_len", 200), ("first_beam_size", 4), ("hotwords", ["a"])],
)
def test_settings_of_prefix_beam_search_are_refused_by_greedy_search(make_strategy, name, value):
    with pytest.raises(ConfigError, match=rf"option {name}=.* is one of prefix beam search .*set search='beam'"):
        make_strategy(search="greedy", **{name: value})


def test_a_beam_of_one_is_allowed_everywhere(make_strategy):
    make_strategy(search="greedy", beam_size=1)
    make_strategy(search="beam", beam_size=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"beam_size": 0},
        {"blank_threshold": 1.5},
        {"search": "prefix"},
        {"beam": 4},
        {"first_beam_size": 0},
        {"max_seq_len": 0},
        {"hotword_boost": float("nan")},
    ],
)
def test_values_out_of_range_and_unknown_names_are_refused(make_strategy, wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        make_strategy(**wrong)


def test_every_option_is_described(make_strategy):
    fields = type(make_strategy().context.options).model_fields
    assert all(info.description for info in fields.values())


def build(options, blank_id):
    model = SimpleNamespace(interfaces={"ctc": SimpleNamespace(blank_id=blank_id, vocab_size=5)})
    return CtcStrategy(DecodeContext(model, ByteTokenizer(), options))


def test_the_blank_is_the_models():
    assert build(CtcStrategy.options_cls(blank_id=2), blank_id=2).blank_id == 2
    with pytest.raises(ConfigError, match=r"blank_id=0.*the model's blank is 2"):
        build(CtcStrategy.options_cls(blank_id=0), blank_id=2)


def test_options_of_another_strategy_are_refused():
    class Foreign(StrategyOptions):
        pass

    with pytest.raises(PluginContractError, match="Foreign"):
        build(Foreign(), blank_id=0)


@pytest.mark.parametrize("mode", ["offline", "streaming"])
def test_more_hypotheses_than_there_are_is_refused_at_admission(make_strategy, mode):
    greedy, beam = make_strategy(search="greedy"), make_strategy(search="beam", beam_size=4)
    for strategy in (greedy, beam):
        strategy.validate(DecodingOptions(word_timestamps=True), mode)
    with pytest.raises(RequestRefusedError, match=rf"n_best=3 .*'ctc' \({mode}\)"):
        greedy.validate(DecodingOptions(n_best=3), mode)
    beam.validate(DecodingOptions(n_best=4), mode)
    with pytest.raises(RequestRefusedError, match=rf"n_best=5 .*'ctc' \({mode}\): beam_size is 4"):
        beam.validate(DecodingOptions(n_best=5), mode)


def test_the_options_import_no_torch():
    code = "import sys, oasr_ctc.options; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_greedy_search_needs_no_compiler():
    code = (
        "import sys; from types import SimpleNamespace as N; from oasr_ctc.strategy import CtcStrategy as S;"
        "from oasr_core.decoding.base import DecodeContext as C;"
        "from oasr_core.testing.decoding import ByteTokenizer as T;"
        "S(C(N(interfaces={'ctc': N(blank_id=0, vocab_size=5)}), T(), S.options_cls(search='greedy')));"
        "sys.exit('numba' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
