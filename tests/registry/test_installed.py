"""Throw-away distributions with real metadata, resolved in subprocesses: good, broken, duplicate, wrong version."""

from __future__ import annotations

import pytest

from oasr_core.testing.plugin_env import PluginEnv, tokenizer_source

BROKEN = {
    "import": "import no_such_module_anywhere\n",
    "syntax": "def broken(:\n",
    "exit": "import sys\nsys.exit(3)\n",
    "wrong": "Tok = 42\n",
    "half": (
        tokenizer_source()
        + "from oasr_core.registry import register_tokenizer, registry\n"
        + "register_tokenizer('half_extra', Tok)\n"
        + "register_tokenizer('half', Tok)\n"
        + "registry('segmenters').register('half_segmenter', Tok)\n"
        + "raise RuntimeError('second thoughts')\n"
    ),
}

PRELUDE = """
import json, sys, warnings
from oasr_core.registry import *
from oasr_core.errors import *
tokenizers = registry("tokenizers")
def attempt(name, axis="tokenizers"):
    try:
        return registry(axis).get(name).__name__
    except OasrError as error:
        cause = error.__cause__
        return [type(error).__name__, str(error), None if cause is None else f"{type(cause).__name__}: {cause}"]
"""


@pytest.fixture(scope="module")
def env(tmp_path_factory) -> PluginEnv:
    """One good distribution among broken, rivalling and outdated ones."""
    env = PluginEnv(tmp_path_factory.mktemp("installed"))
    env.add(
        "acme-good",
        "1.2",
        entry_points={"oasr.tokenizers": {"good": "acme_good:Tok", "alias": "acme_good:Tok", "late": "acme_late:Tok"}},
        modules={"acme_good": tokenizer_source(), "acme_late": "raise AssertionError('nobody asked for this')"},
    )
    for kind, source in BROKEN.items():
        env.add(
            f"acme-{kind}",
            entry_points={"oasr.tokenizers": {kind: f"acme_{kind}:Tok"}},
            modules={f"acme_{kind}": "with open('imports.txt', 'a') as f: f.write(__name__ + '\\n')\n" + source}
            if kind != "syntax"
            else {f"acme_{kind}": source},
        )
    for owner in ("one", "two"):
        env.add(
            f"rival-{owner}",
            entry_points={"oasr.tokenizers": {"rival": f"rival_{owner}:Tok", f"only_{owner}": f"rival_{owner}:Tok"}},
            modules={f"rival_{owner}": tokenizer_source()},
            site=f"site_{owner}",
        )
    env.add(
        "acme-future",
        entry_points={"oasr.tokenizers": {"future": "acme_future:Tok"}},
        modules={"acme_future": tokenizer_source(api="2.0")},
    )
    env.add(
        "acme-silent",
        entry_points={"oasr.tokenizers": {"silent": "acme_silent:Tok"}},
        modules={"acme_silent": tokenizer_source(api=None)},
    )
    env.add("acme-odd", entry_points={"oasr.tokenizers": {"odd": "not a reference!", "gone": "acme_gone.deep:Tok"}})
    return env


def test_a_broken_plugin_breaks_only_itself_and_leaves_nothing_behind(env):
    code = """
names = tokenizers.names()
assert not [m for m in sys.modules if m.startswith(("acme", "rival"))], "listing imported a plugin"
good = attempt("good")
assert tokenizers.get("alias") is tokenizers.get("good")
first = {kind: attempt(kind) for kind in ("import", "syntax", "exit", "wrong", "half", "odd", "gone")}
again = {kind: attempt(kind) for kind in first}
owners = {e.name: e.distribution for e in tokenizers.entries()}
print(json.dumps([names, good, first, again, owners, registry("segmenters").names(), active_plugins()]))
"""
    (env.root / "imports.txt").unlink(missing_ok=True)
    done = env.python(PRELUDE + code)
    names, good, first, again, owners, segmenters, active = done.json()
    assert good == "Tok"
    assert set(BROKEN) | {"good", "alias", "rival", "symbol_table"} <= set(names)
    for kind, cause in (
        ("import", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("syntax", "SyntaxError: invalid syntax"),
        ("exit", "SystemExit: 3"),
        ("half", "RuntimeError: second thoughts"),
        ("odd", "ValueError"),
        ("gone", "ModuleNotFoundError: No module named 'acme_gone'"),
    ):
        error, message, chained = first[kind]
        assert error == "PluginLoadError"
        assert f"tokenizers/{kind} cannot be loaded" in message
        assert f"of acme-{kind if kind != 'gone' else 'odd'} 1.0 raised" in message
        assert chained.startswith(cause)
    assert first["wrong"][0] == "PluginContractError"
    assert "tokenizers/wrong of acme-wrong 1.0 (acme_wrong:Tok) is an instance of int" in first["wrong"][1]
    assert again == first
    imports = (env.root / "imports.txt").read_text().split()
    assert sorted(imports) == ["acme_exit", "acme_half", "acme_import", "acme_wrong"], "a failure was retried"
    assert "half_extra" not in owners
    assert owners["half"] == "acme-half"
    assert "half_segmenter" not in segmenters
    assert active == ["tokenizers/alias acme-good 1.2", "tokenizers/good acme-good 1.2"]


def test_two_owners_of_a_name_are_refused_until_one_is_chosen(env):
    code = """
def module(name): return tokenizers.get(name).__module__
listed = [e.distribution for e in tokenizers.entries() if e.name == "rival"]
refused = attempt("rival")
assert not [m for m in sys.modules if m.startswith("rival")], "a conflict imported a plugin"
chosen = [module("rival-one:rival"), module("Rival_Two:rival"), attempt("acme-good:rival")[1]]
configure_plugins(prefer={"tokenizers/rival": "rival-two"})
chosen.append(module("rival"))
configure_plugins(block=["rival-two"])
chosen.append(module("rival"))
configure_plugins(allow=["tokenizers/only_one", "rival-two"])
chosen.append(module("rival"))
print(json.dumps([listed, refused, chosen]))
"""
    listed, refused, chosen = env.python(PRELUDE + code).json()
    assert listed == ["rival-one", "rival-two"]
    assert refused[0] == "PluginConflictError"
    for part in (
        "rival-one 1.0 (rival_one:Tok) and rival-two 1.0 (rival_two:Tok)",
        "uninstall",
        "OASR_PLUGINS_PREFER=tokenizers/rival=rival-one",
        "rival-one:rival",
    ):
        assert part in refused[1]
    assert chosen[:2] == ["rival_one", "rival_two"]
    assert "comes from rival-one 1.0, rival-two 1.0" in chosen[2]
    assert chosen[3:] == ["rival_two", "rival_one", "rival_two"]


def test_versions_lists_and_strict_mode_from_the_environment(env):
    code = """
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as seen:
    result = [attempt("future"), attempt("silent"), attempt("good"), attempt("only_one"), attempt("symbol_table")]
print(json.dumps([result, [str(w.message) for w in seen]]))
"""
    lists = {
        "OASR_PLUGINS": "acme-future,acme-silent,tokenizers/good,acme-goood",
        "OASR_PLUGINS_PREFER": "tokenizers/rival=rival-two",
    }
    result, seen = env.python(PRELUDE + code, env=lists).json()
    assert result[0][0] == "PluginVersionError"
    assert [line.split() for line in result[0][1].splitlines()[-2:]] == [
        ["Axis", "Required", "Actual"],
        ["tokenizers", "2.0", "1.0"],
    ]
    assert result[1:3] == ["Tok", "Tok"]
    assert "not in the allow list of OASR_PLUGINS" in result[3][1]
    assert result[4] == "SymbolTableTokenizer", "an allow list keeps the core's own"
    assert len(seen) == 2
    assert "OASR_PLUGINS names 'acme-goood', which matches no installed plugin. Did you mean 'acme-good'?" in seen[0]
    assert "tokenizers/silent of acme-silent 1.0 does not state the API version" in seen[1]

    strict = {**lists, "OASR_PLUGINS_STRICT": "1"}
    result, seen = env.python(PRELUDE + code, env=strict).json()
    assert {row[0] for row in result} == {"PluginSelectionError"}
    strict["OASR_PLUGINS"] = "acme-future,acme-silent,tokenizers/good"
    result, seen = env.python(PRELUDE + code, env=strict).json()
    assert result[1][0] == "PluginVersionError"
    assert "Strict mode refuses it" in result[1][1]
    assert result[2] == "Tok"


def test_threads_import_an_entry_once_and_spawned_workers_see_the_same_plugins(env):
    env.add(
        "acme-slow",
        entry_points={"oasr.tokenizers": {"slow": "acme_slow:Tok", "slow_broken": "acme_slow_broken:Tok"}},
        modules={
            "acme_slow": "import builtins, time\nbuiltins.slow = getattr(builtins, 'slow', 0) + 1\ntime.sleep(0.1)\n"
            + tokenizer_source(),
            "acme_slow_broken": "import builtins, time\nbuiltins.bad = getattr(builtins, 'bad', 0) + 1\n"
            "time.sleep(0.1)\nraise RuntimeError('no')\n",
        },
    )
    code = """
import builtins, multiprocessing, threading
def worker(queue):
    from oasr_core.registry import registry
    found = registry("tokenizers").get("good")
    queue.put([found.__module__, found.oasr_api, registry("tokenizers").get("rival").__module__, attempt("import")[0]])
if __name__ == "__main__":
    results = []
    def run(name):
        results.append(attempt(name))
    threads = [threading.Thread(target=run, args=(name,)) for name in ["slow", "slow_broken"] * 4]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=worker, args=(queue,))
    process.start()
    remote = queue.get(timeout=30)
    process.join()
    kinds = sorted(r if isinstance(r, str) else r[0] for r in results)
    print(json.dumps([kinds, builtins.slow, builtins.bad, remote]))
"""
    done = env.python(PRELUDE + code, env={"OASR_PLUGINS_PREFER": "tokenizers/rival=rival-two"})
    kinds, slow, bad, remote = done.json()
    assert kinds == ["PluginLoadError"] * 4 + ["Tok"] * 4
    assert (slow, bad) == (1, 1)
    assert remote == ["acme_good", "1.0", "rival_two", "PluginLoadError"]


def test_loading_itself_is_named_nested_loading_survives_and_refresh_tries_again(env):
    env.add(
        "acme-knot",
        entry_points={
            "oasr.tokenizers": {
                "knot": "acme_knot:Tok",
                "outer": "acme_outer:Tok",
                "inner": "acme_inner:Tok",
                "late_fix": "acme_late_fix:Tok",
            }
        },
        modules={
            "acme_knot": "from oasr_core.registry import registry\nregistry('tokenizers').get('knot')\n",
            "acme_outer": "from oasr_core.registry import registry\n"
            "registry('tokenizers').get('inner')\nraise OSError('x')\n",
            "acme_inner": tokenizer_source()
            + "from oasr_core.registry import register_tokenizer\nregister_tokenizer('inner_extra', Tok)\n",
            "acme_late_fix": "raise OSError('not yet')\n",
        },
    )
    code = f"""
knot, outer = attempt("knot"), attempt("outer")
inner = [attempt("inner"), attempt("inner_extra")]
before = attempt("late_fix")[0]
path = {str(env.root / "site" / "acme_late_fix.py")!r}
open(path, "w").write({tokenizer_source()!r})
import importlib; importlib.invalidate_caches()
still = attempt("late_fix")[0]
refresh_plugins()
print(json.dumps([knot, outer, inner, before, still, attempt("late_fix")]))
"""
    knot, outer, inner, before, still, after = env.python(PRELUDE + code).json()
    assert "asks for itself" in knot[2]
    assert outer[2] == "OSError: x"
    assert inner == ["Tok", "Tok"]
    assert (before, still, after) == ("PluginLoadError", "PluginLoadError", "Tok")
