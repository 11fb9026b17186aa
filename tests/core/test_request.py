"""Request options are refused with the project's own error."""

from __future__ import annotations

import pytest

from oasr_core.errors import RequestRefusedError
from oasr_core.request import DecodingOptions


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_best": 0}, r"n_best: .* \(got 0\)"),
        ({"nbest": 3}, r"unknown option 'nbest'; .*Did you mean 'n_best'\?"),
        ({"hotwords": [{"phrase": "a", "bost": 1}]}, r"unknown option 'hotwords\.0\.bost'; .*Did you mean 'boost'\?"),
        ({"hotwords": [" "]}, r"hotwords\.0\.phrase: "),
    ],
)
def test_wrong_options_are_refused(values, message):
    with pytest.raises(RequestRefusedError, match=message):
        DecodingOptions(**values)
    with pytest.raises(ValueError, match=message):
        DecodingOptions.model_validate(values)


def test_options_survive_a_round_trip():
    options = DecodingOptions(n_best=2, hotwords=["one"])
    assert DecodingOptions.model_validate(options.model_dump()) == options
    assert options.model_copy(update={"n_best": 3}).n_best == 3
