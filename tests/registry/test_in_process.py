"""Registration by a call or a decorator is the same registry as entry points."""

from __future__ import annotations

import pytest

from oasr_core._plugins.axes import FIRST_PARTY, PLANNED
from oasr_core.errors import PluginConflictError, PluginContractError, UnknownPluginError
from oasr_core.registry import (
    IN_PROCESS,
    OasrPluginWarning,
    configure_plugins,
    register_batching_policy,
    register_partition_policy,
    register_tokenizer,
    registry,
)
from oasr_core.testing.plugin_env import tokenizer_source


def make_tokenizer(name: str = "Tok", api: str | None = "1.0") -> type:
    """A fresh valid tokenizer class."""
    scope: dict[str, object] = {"__name__": "made_here"}
    exec(tokenizer_source(name, api), scope)
    return scope[name]  # type: ignore[return-value]


@pytest.fixture
def tokenizers():
    """The tokenizer registry; what a test registers is taken back."""
    one = registry("tokenizers")
    yield one
    for entry in one.entries():
        if entry.distribution == IN_PROCESS:
            one.unregister(entry.name)


def test_registered_object_is_listed_resolved_and_taken_back(tokenizers):
    tok = make_tokenizer()
    register_tokenizer("mine", tok)
    assert "mine" in tokenizers.names()
    assert tokenizers.get("mine") is tok
    assert tokenizers.get("in-process:mine") is tok
    assert [e.owner for e in tokenizers.entries() if e.name == "mine"] == [IN_PROCESS]
    tokenizers.unregister("mine")
    assert "mine" not in tokenizers.names()
    with pytest.raises(UnknownPluginError, match="OASR_PLUGINS_BLOCK=tokenizers/mine"):
        tokenizers.unregister("mine")


def test_same_object_twice_and_two_names_are_fine_another_object_is_not(tokenizers):
    tok, other = make_tokenizer(), make_tokenizer("Other")
    tokenizers.register("mine", tok)
    tokenizers.register("mine", tok)
    tokenizers.register("alias", tok)
    assert tokenizers.get("alias") is tokenizers.get("mine")
    with pytest.raises(PluginConflictError, match=r"made_here:Tok.*made_here:Other.*replace=True"):
        tokenizers.register("mine", other)
    tokenizers.register("mine", other, replace=True)
    assert tokenizers.get("mine") is other


def test_conflict_with_an_installed_name_is_settled_by_name_preference_or_replace(tokenizers):
    tok = make_tokenizer()
    tokenizers.register("symbol_table", tok)
    with pytest.raises(PluginConflictError, match=r"in-process \(made_here:Tok\) and oasr-core 0.*Three ways out"):
        tokenizers.get("symbol_table")
    assert tokenizers.get("oasr-core:symbol_table").__name__ == "SymbolTableTokenizer"
    assert tokenizers.get("OASR_Core:symbol_table").__name__ == "SymbolTableTokenizer"
    configure_plugins(prefer={"tokenizers/symbol_table": "in-process"})
    assert tokenizers.get("symbol_table") is tok
    configure_plugins(prefer={"tokenizers/symbol_table": "oasr-core"})
    assert tokenizers.get("symbol_table") is not tok
    configure_plugins()
    tokenizers.register("symbol_table", tok, replace=True)
    assert tokenizers.get("symbol_table") is tok


def test_registering_the_installed_object_under_its_own_name_is_no_conflict(tokenizers):
    installed = tokenizers.get("symbol_table")
    tokenizers.register("symbol_table", installed)
    assert tokenizers.get("symbol_table") is installed
    assert sum(entry.name == "symbol_table" for entry in tokenizers.entries()) == 1
    tokenizers.unregister("symbol_table")


def test_override_holds_inside_the_block_only_also_when_it_raises(tokenizers):
    tok, registered = make_tokenizer(), make_tokenizer("Other")
    tokenizers.register("mine", registered)
    with tokenizers.override("symbol_table", tok), tokenizers.override("mine", tok):
        assert tokenizers.get("symbol_table") is tok
        assert tokenizers.get("mine") is tok
    with pytest.raises(RuntimeError, match="inside"), tokenizers.override("mine", tok):
        raise RuntimeError("inside")
    assert tokenizers.get("mine") is registered
    assert tokenizers.get("symbol_table") is not tok


def test_decorators_return_the_class_and_register_it():
    from oasr_core.scheduling.partition import CountPartition
    from oasr_core.scheduling.policies import FcfsPolicy

    @register_batching_policy("mine")
    class Mine(FcfsPolicy):
        oasr_api = "1.0"

    @register_partition_policy("mine")
    class Cut(CountPartition):
        oasr_api = "1.0"

    try:
        assert registry("batching_policies").get("mine") is Mine
        assert registry("partition_policies").get("mine") is Cut
    finally:
        registry("batching_policies").unregister("mine")
        registry("partition_policies").unregister("mine")


def test_a_registered_object_is_checked_when_it_is_resolved(tokenizers):
    tokenizers.register("wrong", int)
    with pytest.raises(PluginContractError, match=r"tokenizers/wrong of in-process .*the class int.*base\.Tokenizer"):
        tokenizers.get("wrong")
    tokenizers.register("unversioned", make_tokenizer(api=None))
    with pytest.warns(OasrPluginWarning, match="does not state the API version"):
        tokenizers.get("unversioned")
    tokenizers.get("unversioned")  # said once


@pytest.mark.parametrize("name", ["", "a:b", "a/b"])
def test_names_that_could_not_be_asked_for_are_refused(tokenizers, name):
    with pytest.raises(PluginContractError, match="is no name for a tokenizer"):
        tokenizers.register(name, make_tokenizer())


def test_unknown_name_lists_owners_nearest_and_what_to_install(tokenizers):
    with pytest.raises(
        UnknownPluginError, match=r"symbol_table \(oasr-core\).*Did you mean 'symbol_table'\?"
    ) as caught:
        tokenizers.get("symbol_tabel")
    assert isinstance(caught.value, KeyError)
    with pytest.raises(UnknownPluginError, match=r"comes from oasr-core"):
        tokenizers.get("acme:symbol_table")
    for axis, name, distribution in (
        ("decode_strategies", "llm", "oasr-llm"),
        ("models", "nemotron", "oasr-nemotron"),
        ("models", "paraformer", "oasr-paraformer"),
        ("commands", "serve", "oasr-server"),
    ):
        with pytest.raises(UnknownPluginError, match=f"pip install {distribution}"):
            registry(axis).get(name)


def test_describe_gives_owner_version_source_and_options(tokenizers):
    facts = tokenizers.describe("symbol_table")
    assert (facts["distribution"], facts["api"], facts["options"]) == ("oasr-core", "1.0", [])
    assert "symbol_table.py:" in facts["source"]
    assert facts["summary"]


def test_a_first_party_distribution_is_in_this_repository_or_planned(repo_root):
    for distribution in {*FIRST_PARTY.values(), *PLANNED}:
        assert (repo_root / "plugins" / distribution).is_dir() != (distribution in PLANNED), distribution
