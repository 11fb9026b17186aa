"""Observers are told, decide nothing, and cannot hurt the engine."""

from __future__ import annotations

import json
import logging

import pytest

from oasr_core.errors import PluginContractError
from oasr_core.hooks import Observers, hookimpl
from oasr_core.testing.plugin_env import PluginEnv


class Recorder:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    @hookimpl
    def oasr_request_admitted(self, request_id, streaming):
        self.seen.append((request_id, streaming))

    @hookimpl
    def oasr_step_done(self, seconds):
        self.seen.append(seconds)


class Failing:
    """Raises whenever it is told anything."""

    @hookimpl
    def oasr_step_done(self, outputs, seconds):
        raise SystemExit("observer")

    @hookimpl
    def oasr_engine_started(self, engine):
        raise ValueError("observer")


def test_observers_get_the_arguments_they_ask_for_and_failures_are_contained_and_counted(caplog):
    observers, recorder = Observers(installed=False), Recorder()
    assert not observers.watches("oasr_step_done")
    observers.notify("oasr_step_done", outputs=[], seconds=0.5)
    observers.register(Failing(), "failing")
    observers.register(recorder)
    observers.register(recorder)
    with caplog.at_level(logging.ERROR):
        observers.notify("oasr_request_admitted", request_id="a", streaming=True)
        observers.notify("oasr_step_done", outputs=[], seconds=0.5)
        observers.notify("oasr_step_done", outputs=[], seconds=0.25)
        observers.notify("oasr_engine_started", engine=None)
        observers.notify("oasr_request_finished", output=None)
    assert recorder.seen == [("a", True), 0.5, 0.25]
    assert observers.errors == {"failing": 3}
    assert "observer failing failed in oasr_step_done" in caplog.text
    observers.unregister(recorder)
    observers.notify("oasr_request_admitted", request_id="b", streaming=False)
    assert len(recorder.seen) == 3
    assert not observers.watches("oasr_request_admitted")


def test_the_last_registered_observer_is_told_first():
    told = []

    class Named:
        def __init__(self, name):
            self.name = name

        @hookimpl
        def oasr_engine_stopping(self):
            told.append(self.name)

    observers = Observers(installed=False)
    for name in ("a", "b"):
        observers.register(Named(name), name)
    observers.notify("oasr_engine_stopping", engine=None)
    assert told == ["b", "a"]
    with pytest.raises(PluginContractError, match="already registered"):
        observers.register(Named("a"), "a")


class Unknown:
    @hookimpl
    def oasr_step_don(self):
        """No such hook."""


class WrongArgument:
    @hookimpl
    def oasr_step_done(self, duration):
        """No such argument."""


class Wrapper:
    @hookimpl(wrapper=True)
    def oasr_step_done(self):
        yield


class Nothing:
    pass


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        (Unknown(), "oasr_step_don"),
        (WrongArgument(), "duration"),
        (Wrapper(), "wrap nothing"),
        (Nothing(), "implements no hook"),
        (Recorder, "is a class"),
    ],
)
def test_what_is_no_observer_is_refused_and_leaves_nothing_behind(plugin, reason):
    observers = Observers(installed=False)
    with pytest.raises(PluginContractError, match=reason):
        observers.register(plugin)
    assert not observers.watches("oasr_step_done")
    observers.register(Recorder())


GOOD = """
from oasr_core.hooks import hookimpl
OASR_API = {"observers": "1.0"}
seen = []
@hookimpl
def oasr_step_done(seconds):
    seen.append(seconds)
"""


def test_installed_observers_go_through_the_guarded_loader_and_the_lists(tmp_path):
    env = PluginEnv(tmp_path)
    env.add("watch-a", entry_points={"oasr": {"watch": "watch_a"}}, modules={"watch_a": GOOD})
    env.add("watch-b", entry_points={"oasr": {"watch": "watch_b"}}, modules={"watch_b": GOOD})
    env.add("watch-c", entry_points={"oasr": {"blocked": "watch_c"}}, modules={"watch_c": GOOD})
    env.add("watch-d", entry_points={"oasr": {"broken": "watch_d"}}, modules={"watch_d": "raise SystemExit('x')"})
    env.add("watch-e", entry_points={"oasr": {"empty": "watch_e"}}, modules={"watch_e": GOOD.replace("@hookimpl", "")})
    code = """
import json, sys, warnings
from oasr_core.hooks import Observers
from oasr_core.errors import OasrError
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    observers = Observers()
observers.notify("oasr_step_done", outputs=[], seconds=2.0)
import watch_a, watch_b
try:
    from oasr_core.registry import configure_plugins
    configure_plugins(strict=True)
    Observers()
    strict = None
except OasrError as error:
    strict = str(error)
print(json.dumps([watch_a.seen, watch_b.seen, sorted(observers.broken), [str(w.message) for w in caught],
                  [m for m in ("watch_c", "torch") if m in sys.modules], strict]))
"""
    seen_a, seen_b, broken, messages, imported, strict = env.python(code, env={"OASR_PLUGINS_BLOCK": "watch-c"}).json()
    assert (seen_a, seen_b) == ([2.0], [2.0])
    assert broken == ["broken", "empty"]
    assert [m.partition(" is left out")[0] for m in messages] == [
        "The observer 'broken' of watch-d 1.0",
        "The observer 'empty' of watch-e 1.0",
    ]
    assert imported == []
    assert "observers/broken cannot be loaded" in strict
    done = env.cli(
        "plugins", "check", "--json", env={"OASR_PLUGINS_BLOCK": "watch-c,oasr-core,oasr-ctc,oasr-conformer"}
    )
    assert done.returncode == 2, "the command itself is blocked"
    assert json.dumps("commands/plugins may not be used")[1:-1] in done.stderr
