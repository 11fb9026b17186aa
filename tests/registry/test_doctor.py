"""What ``oasr plugins doctor`` finds without importing a plugin."""

from __future__ import annotations

import pytest

from oasr_core._plugins.diagnose import module_exists
from oasr_core.testing.plugin_env import PluginEnv, tokenizer_source


def findings(env: PluginEnv, **variables: str) -> dict[str, list[dict[str, str]]]:
    """Findings by kind, of the throw-away distributions only."""
    done = env.cli("plugins", "doctor", "--json", env=variables)
    assert done.returncode in (0, 1), done.stderr
    kinds: dict[str, list[dict[str, str]]] = {}
    for finding in done.json():
        kinds.setdefault(finding["kind"], []).append(finding)
    assert done.returncode == (1 if kinds else 0)
    return kinds


def test_every_kind_of_finding_is_reported_with_its_subject(plugin_env):
    add = plugin_env.add
    # The stale copy comes first on the path and has no entry points, so that it hides those of the real one.
    add("acme-stale", "0.9", site="stale", first=True)
    add(
        "acme-stale",
        "1.0",
        entry_points={"oasr.tokenizers": {"hidden": "acme_hidden:Tok"}},
        modules={"acme_hidden": tokenizer_source()},
    )
    add(
        "acme-gone",
        entry_points={"oasr.tokenizers": {"gone": "acme_pkg.gone:Tok"}},
        modules={"acme_pkg/__init__.py": "1/0"},
    )
    add("acme-old", requires=["oasr-core>=99; python_version > '3'", "oasr-core>=98; extra == 'x'"])
    add("acme-typo", entry_points={"oasr.model": {"m": "acme_typo:M"}})
    add("oasr-acme", requires=["oasr-core"])
    for owner in ("one", "two"):
        add(
            f"rival-{owner}",
            entry_points={"oasr.segmenters": {"rival": f"rival_{owner}:X"}},
            modules={f"rival_{owner}": ""},
        )
    found = findings(plugin_env, OASR_PLUGINS_BLOCK="acme-gon", OASR_PLUGINS_STRICT="1")

    (duplicate,) = found["duplicate-distribution"]
    assert duplicate["subject"] == "acme-stale"
    first, second = duplicate["message"].split("; ")[:2]
    assert "stale" in first
    assert "version 0.9, 0 oasr entry points" in first
    assert "version 1.0, 1 oasr entry points" in second
    assert "tokenizers/gone" in {finding["subject"] for finding in found["missing-module"]}
    (core,) = found["core-version"]
    assert "acme-old 1.0 requires oasr-core>=99, and 0.1.0 is installed" in core["message"]
    (group,) = found["unknown-group"]
    assert group["subject"] == "oasr.model/m"
    assert "Did you mean 'oasr.models'?" in group["message"]
    (nothing,) = found["no-entry-points"]
    assert nothing["subject"] == "oasr-acme"
    (unmatched,) = found["unmatched-name"]
    assert "OASR_PLUGINS_BLOCK names 'acme-gon'" in unmatched["message"]
    (conflict,) = found["conflict"]
    assert conflict["subject"] == "segmenters/rival"


@pytest.mark.parametrize(
    ("name", "exists"),
    [("json", True), ("json.decoder", True), ("json.nothing", False), ("os.path.x", False), ("no_such_top.x", False)],
)
def test_modules_are_found_without_importing_packages(name, exists):
    assert module_exists(name) is exists
