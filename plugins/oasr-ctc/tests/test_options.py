"""What greedy search serves, and how it refuses the rest."""

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


def test_defaults_are_greedy(make_strategy):
    assert make_strategy().context.options.model_dump() == {
        "search": "greedy",
        "blank_id": None,
        "beam_size": 1,
        "blank_threshold": None,
        "max_seq_len": None,
    }
    assert make_strategy(blank_id=3).blank_id == 3


@pytest.mark.parametrize(("name", "value"), [("beam_size", 10), ("blank_threshold", 0.98), ("max_seq_len", 200)])
def test_settings_of_prefix_beam_search_are_refused_by_name(make_strategy, name, value):
    with pytest.raises(ConfigError, match=rf"{name}={value}.*prefix beam search is not served yet; use greedy"):
        make_strategy(**{name: value})


@pytest.mark.parametrize("wrong", [{"beam_size": 0}, {"blank_threshold": 1.5}, {"search": "prefix"}, {"beam": 4}])
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
def test_more_than_one_hypothesis_is_refused_at_admission(make_strategy, mode):
    strategy = make_strategy()
    strategy.validate(DecodingOptions(word_timestamps=True), mode)
    with pytest.raises(RequestRefusedError, match=rf"n_best=3 .*'ctc' \({mode}\)"):
        strategy.validate(DecodingOptions(n_best=3), mode)


def test_the_options_import_no_torch():
    code = "import sys, oasr_ctc.options; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
