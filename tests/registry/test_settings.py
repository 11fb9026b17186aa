"""Allow and block lists, preferences, strict mode."""

from __future__ import annotations

import warnings

import pytest

from oasr_core._plugins.settings import Settings, canonical, current_settings
from oasr_core.errors import PluginSelectionError, UnknownPluginError
from oasr_core.registry import Entry, OasrPluginWarning, configure_plugins, registry

CORE = Entry("tokenizers", "symbol_table", "oasr-core", "0.1.0", "m:A")
ACME = Entry("models", "acme", "acme.ASR", "1.0", "m:B")
RIVAL = Entry("models", "acme", "rival", "1.0", "m:C")
ORIGIN = {"allow": "ALLOW", "block": "BLOCK", "prefer": "PREFER"}


def test_names_of_distributions_are_compared_as_packaging_does():
    assert canonical("Acme_ASR.x") == canonical("acme-asr-x")


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        (Settings(), [CORE, ACME, RIVAL]),
        (Settings(allow=("acme-asr",), origin=ORIGIN), [CORE, ACME]),
        (Settings(allow=("models/acme",), origin=ORIGIN), [CORE, ACME, RIVAL]),
        (Settings(allow=("rival",), block=("models/acme",), origin=ORIGIN), [CORE]),
        (Settings(block=("acme-asr",), origin=ORIGIN), [CORE, RIVAL]),
        (Settings(block=("oasr-core",), origin=ORIGIN), [ACME, RIVAL]),
        (Settings(block=("tokenizers/symbol_table",), origin=ORIGIN), [ACME, RIVAL]),
        (Settings(allow=(), origin=ORIGIN), [CORE]),
    ],
)
def test_lists_keep_out_what_they_name_and_an_allow_list_never_the_core(settings, allowed):
    assert [entry for entry in (CORE, ACME, RIVAL) if settings.refusal(entry) is None] == allowed


def test_every_name_that_matches_nothing_is_reported():
    settings = Settings(
        allow=("acme-asr", "acme-asx"),
        block=("models/acne",),
        prefer=(("models/acme", "oasr-core"), ("models/nix", "x"), ("models/acme", "rival")),
        origin=ORIGIN,
    )
    messages = settings.unmatched([CORE, ACME, RIVAL])
    assert len(messages) == 4
    assert "ALLOW names 'acme-asx', which matches no installed plugin. Did you mean 'acme-asr'?" in messages[0]
    assert "BLOCK names 'models/acne'" in messages[1]
    assert "Did you mean 'models/acme'?" in messages[1]
    assert "PREFER prefers 'oasr-core' for models/acme, which comes from acme.ASR, rival." in messages[2]
    assert "PREFER names 'models/nix'" in messages[3]


def test_environment_is_read_and_a_call_outranks_it_field_by_field(monkeypatch):
    monkeypatch.setenv("OASR_PLUGINS", " acme-asr , models/x,")
    monkeypatch.setenv("OASR_PLUGINS_BLOCK", "rival")
    monkeypatch.setenv("OASR_PLUGINS_PREFER", "models/acme = acme-asr")
    monkeypatch.setenv("OASR_PLUGINS_STRICT", "1")
    expected = Settings(("acme-asr", "models/x"), ("rival",), (("models/acme", "acme-asr"),), True)
    assert current_settings() == expected
    configure_plugins(allow=["other"], strict=False)
    assert current_settings() == Settings(("other",), ("rival",), (("models/acme", "acme-asr"),), False)
    assert current_settings().origin["allow"] == "configure_plugins(allow=...)"
    assert current_settings().origin["block"] == "OASR_PLUGINS_BLOCK"
    configure_plugins()
    assert current_settings() == expected


def test_an_empty_variable_is_no_allow_list(monkeypatch):
    monkeypatch.setenv("OASR_PLUGINS", " ")
    assert current_settings().allow is None


def test_a_preference_without_an_equals_sign_is_refused(monkeypatch):
    monkeypatch.setenv("OASR_PLUGINS_PREFER", "models/acme")
    with pytest.raises(PluginSelectionError, match="axis/name=distribution"):
        current_settings()


def test_typo_warns_once_and_fails_every_time_in_strict_mode():
    configure_plugins(allow=["oasr-confomer"])
    tokenizers = registry("tokenizers")
    with pytest.warns(OasrPluginWarning, match="Did you mean 'oasr-conformer'"):
        tokenizers.get("symbol_table")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizers.get("symbol_table")
    configure_plugins(allow=["oasr-confomer"], strict=True)
    for _ in range(2):
        with pytest.raises(PluginSelectionError, match="oasr-confomer"):
            tokenizers.get("symbol_table")


def test_what_is_kept_out_says_by_what():
    configure_plugins(allow=["oasr-ctc"])
    assert "conformer" not in registry("models").names()
    with pytest.raises(UnknownPluginError, match=r"oasr-conformer 0.* has it, but it is not in the allow list of conf"):
        registry("models").get("conformer")
    configure_plugins(block=["tokenizers/symbol_table"])
    with pytest.raises(UnknownPluginError, match=r"blocked by 'tokenizers/symbol_table' in configure_plugins\(block"):
        registry("tokenizers").get("symbol_table")
    assert "sentencepiece" in registry("tokenizers").names()
