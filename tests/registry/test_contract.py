"""What a resolved object is refused for: version, base class, members, options, signatures."""

from __future__ import annotations

import sys
import types

import pytest

from oasr_core._plugins.contract import check_class, check_object, declared_api
from oasr_core.checkpoints.converter import CheckpointConverter
from oasr_core.errors import PluginContractError, PluginVersionError
from oasr_core.registry import AXES, Axis, Entry, OasrPluginWarning
from oasr_core.tokenizers.base import Tokenizer

ENTRY = Entry("tokenizers", "acme", "acme-asr", "2.0", "acme:Tok")
TOKENIZERS = AXES["tokenizers"]


def tokenizer(**members):
    """A valid tokenizer class, with members replaced (``None`` leaves one out)."""
    base = {
        "oasr_api": "1.0",
        "from_spec": classmethod(lambda cls, spec: cls()),
        "vocab_size": 3,
        "special_ids": frozenset(),
        "decode": lambda self, ids: "",
        "token_pieces": lambda self, ids: [],
        "incremental": lambda self: None,
    }
    return type("Tok", (Tokenizer,), {k: v for k, v in {**base, **members}.items() if v is not None})


def check(obj, axis=TOKENIZERS, strict=False):
    check_object(axis, ENTRY, obj, strict=strict)


def test_a_good_class_passes():
    check(tokenizer(), strict=True)


@pytest.mark.parametrize("version", ["2.0", "0.9", "1.1", "1.10"])
def test_other_major_or_newer_minor_is_refused_with_a_table(version):
    with pytest.raises(PluginVersionError) as caught:
        check(tokenizer(oasr_api=version))
    header, row = str(caught.value).splitlines()[-2:]
    assert header.split() == ["Axis", "Required", "Actual"]
    assert row.split() == ["tokenizers", version, "1.0"]
    assert "tokenizers/acme of acme-asr 2.0" in str(caught.value)
    assert ("upgrade acme-asr" if version == "0.9" else "upgrade oasr-core") in str(caught.value)


def test_older_minor_is_served():
    axis = Axis("tokenizers", "oasr.tokenizers", "tokenizer", TOKENIZERS.contract, api=(1, 3))
    check(tokenizer(oasr_api="1.2"), axis)
    with pytest.raises(PluginVersionError):
        check(tokenizer(oasr_api="1.4"), axis)


@pytest.mark.parametrize("version", [1.0, "1", "one.two", (1, 0), ""])
def test_a_version_that_is_none_is_refused(version):
    with pytest.raises(PluginVersionError, match=r"expected a string 'major\.minor' such as '1\.0'"):
        check(tokenizer(oasr_api=version))


def test_missing_version_warns_and_is_refused_in_strict_mode():
    with pytest.warns(OasrPluginWarning, match=r'oasr_api = "1\.0".*OASR_API'):
        check(tokenizer(oasr_api=None))
    with pytest.raises(PluginVersionError, match="Strict mode"):
        check(tokenizer(oasr_api=None), strict=True)


def test_version_comes_from_the_class_hierarchy_not_from_the_contract(monkeypatch):
    class Child(tokenizer()):  # type: ignore[misc]
        pass

    assert declared_api(TOKENIZERS, ENTRY, Child, Tokenizer) == "1.0"
    monkeypatch.setattr(Tokenizer, "oasr_api", "9.9", raising=False)
    assert declared_api(TOKENIZERS, ENTRY, Child, Tokenizer) == "1.0"
    assert declared_api(TOKENIZERS, ENTRY, tokenizer(oasr_api=None), Tokenizer) is None


def test_version_of_an_object_that_cannot_carry_it_comes_from_its_module(monkeypatch):
    import typer

    module = types.ModuleType("acme_commands")
    module.OASR_API = {"commands": "1.0", "models": "7.0"}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "acme_commands", module)

    class Point:
        module = "acme_commands"

    entry = Entry("commands", "acme", "acme-asr", "2.0", "acme_commands:app", Point())  # type: ignore[arg-type]
    assert declared_api(AXES["commands"], entry, typer.Typer(), typer.Typer) == "1.0"
    assert declared_api(TOKENIZERS, entry, typer.Typer(), None) is None


def test_version_of_an_instance_may_stand_on_it_or_in_its_class():
    class Thing:
        oasr_api = "1.0"

    thing = Thing()
    assert declared_api(AXES["segmenters"], ENTRY, thing, None) == "1.0"
    thing.oasr_api = "1.1"
    assert declared_api(AXES["segmenters"], ENTRY, thing, None) == "1.1"


@pytest.mark.parametrize(
    ("obj", "got"),
    [(42, "an instance of int"), (str, "the class str"), (tokenizer()(), "an instance of Tok")],
)
def test_wrong_type_is_refused(obj, got):
    with pytest.raises(PluginContractError, match=rf"{got}; the axis tokenizers takes a subclass of .*base\.Tokenizer"):
        check(obj)


def test_an_instance_axis_refuses_a_class():
    import typer

    with pytest.raises(PluginContractError, match=r"the class Typer; the axis commands takes an instance of typer"):
        check(typer.Typer, AXES["commands"])


def test_missing_members_are_all_named():
    with pytest.raises(PluginContractError, match=r"Tok lacks decode, vocab_size, which Tokenizer requires"):
        check(tokenizer(decode=None, vocab_size=None))


def test_members_that_are_declared_without_a_value_are_required():
    class Converter(CheckpointConverter):
        oasr_api = "1.0"

        def detect(self, peek):
            return None

        def convert(self, peek, *, checkpoint_name=None):
            raise NotImplementedError

    with pytest.raises(PluginContractError, match="Converter lacks looks_for, architectures"):
        check(Converter, AXES["converters"])


def test_options_are_pydantic_classes():
    with pytest.raises(PluginContractError, match=r"Tok\.options_cls is <class 'dict'>; .*pydantic\.BaseModel"):
        check(tokenizer(options_cls=dict))


def test_axes_without_a_contract_check_the_version_alone():
    class Scheme:
        oasr_api = "2.0"

    with pytest.raises(PluginVersionError):
        check(Scheme, AXES["quantization"])


def signature_cases():
    """Overrides of ``decode(self, ids)`` and what they are refused with, ``None`` where they are fine."""
    return [
        (lambda self, ids: "", None),
        (lambda self, ids, extra=1: "", None),
        (lambda self, *args: "", None),
        (lambda self, *args, **kwargs: "", None),
        (lambda self, tokens: "", "cannot take the parameter 'ids' in position 1"),
        (lambda self: "", "cannot take the parameter 'ids' in position 1"),
        (lambda self, *, ids: "", "cannot take the parameter 'ids' in position 1"),
        (lambda self, **kwargs: "", "cannot take the parameter 'ids' in position 1"),
        (lambda self, ids, style: "", "requires the parameter 'style', which no caller passes"),
        (lambda self, ids, *, style: "", "requires the parameter 'style', which no caller passes"),
    ]


@pytest.mark.parametrize(("override", "problem"), signature_cases())
def test_overrides_take_what_the_contract_passes(override, problem):
    if problem is None:
        check(tokenizer(decode=override))
        return
    with pytest.raises(PluginContractError) as caught:
        check(tokenizer(decode=override))
    message = str(caught.value)
    assert problem in message
    assert "Tokenizer.decode(self, ids: Sequence[int]) -> str" in message.replace("'", "")
    assert f"{__file__}:" in message


def test_methods_of_another_kind_are_refused():
    with pytest.raises(PluginContractError, match=r"Tok\.from_spec is of type function; .* is classmethod"):
        check(tokenizer(from_spec=lambda cls, spec: None))
    with pytest.raises(PluginContractError, match=r"Tok\.decode is of type property; .* is function"):
        check(tokenizer(decode=property(lambda self: "")))
    with pytest.raises(PluginContractError, match=r"Tok\.vocab_size is of type function; .* is a property"):
        check(tokenizer(vocab_size=lambda self: 3))
    check(tokenizer(from_spec=staticmethod(lambda spec: None)))
    check(tokenizer(vocab_size=property(lambda self: 3)))


def test_keyword_parameters_without_default_are_required():
    class Contract:
        def score(self, hidden, *, reverse): ...

    Contract.__module__ = "oasr_core.made_up"

    class Takes(Contract):
        def score(self, hidden, *, reverse, extra=0): ...

    class Lacks(Contract):
        def score(self, hidden): ...

    check_class(Takes, Contract, "x")
    with pytest.raises(PluginContractError, match="cannot take the keyword 'reverse'"):
        check_class(Lacks, Contract, "x")
