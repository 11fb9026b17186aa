"""What the options and requests may ask for, and by what name the rest is refused."""

from __future__ import annotations

import pytest

from oasr_core.errors import ConfigError, RequestRefusedError
from oasr_core.registry import registry
from oasr_core.request import DecodingOptions
from oasr_transducer.options import TransducerOptions
from oasr_transducer.strategy import TransducerStrategy


def test_the_defaults_are_the_manuals(make_script):
    options = TransducerOptions()
    assert (options.search, options.beam_size, options.max_sym_per_frame) == ("greedy", 4, None)
    make_script(0).strategy()


def test_the_entry_point_leads_here():
    assert registry("decode_strategies").get("transducer") is TransducerStrategy


@pytest.mark.parametrize(
    ("name", "value"),
    [("beam_size", 4), ("hotwords", ("a",)), ("hotword_boost", 2.0), ("strict_hotwords", True)],
)
def test_greedy_refuses_settings_of_beam_search(make_script, name, value):
    with pytest.raises(ConfigError, match=name):
        make_script(0).strategy(**{name: value})


def test_a_beam_of_one_is_what_greedy_search_has(make_script):
    assert make_script(0).strategy(beam_size=1).search.open(DecodingOptions()) is not None


def test_beam_search_refuses_more_symbols_a_frame_and_durations(make_script):
    make_script(0, max_sym=10).strategy(search="beam")
    make_script(0).strategy(search="beam", max_sym_per_frame=1)
    with pytest.raises(ConfigError, match=r"max_sym_per_frame=2.*at most one token"):
        make_script(0).strategy(search="beam", max_sym_per_frame=2)
    with pytest.raises(ConfigError, match=r"search='beam'.*durations \(0, 1\)"):
        make_script(0, durations=(0, 1)).strategy(search="beam")


@pytest.mark.parametrize("wanted", [DecodingOptions(n_best=2), DecodingOptions(hotwords=("a",))])
def test_greedy_refuses_requests_for_what_it_has_not(make_script, wanted):
    with pytest.raises(RequestRefusedError, match="search='beam'"):
        make_script(0).strategy().validate(wanted, "offline")


def test_n_best_is_bounded_by_the_beam(make_script):
    strategy = make_script(0).strategy(search="beam", beam_size=3)
    strategy.validate(DecodingOptions(n_best=3), "offline")
    with pytest.raises(RequestRefusedError, match="beam_size is 3"):
        strategy.validate(DecodingOptions(n_best=4), "streaming")


def test_n_best_gives_as_many_as_were_asked_for(make_script, as_output):
    strategy = make_script(0, blank_bias=0.0).strategy(search="beam")
    out = as_output([[1, 2, 3, 4, 5]] * 3)
    asked = [DecodingOptions(n_best=n) for n in (1, 2, 4)]
    assert [len(hyps.nbest) for hyps in strategy.decode_offline(out, asked)] == [1, 2, 4]
