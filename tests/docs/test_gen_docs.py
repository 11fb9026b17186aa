"""The documentation generator: what it refuses, and that the repository's own files are up to date."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def coverage_of(gen_docs: ModuleType, tmp_path):
    """Builds a coverage table from the text of its rows."""

    def build(rows: str, key: str = "S1") -> Any:
        path = tmp_path / "coverage.toml"
        path.write_text(f'[issues]\n3 = "x"\n[sections."{key}"]\ntitle = "One"\n[sections."{key}".rows]\n{rows}\n')
        return gen_docs.load_coverage(path)

    return build


def faults(gen_docs, coverage, root, fields=()):
    return gen_docs.check_coverage(coverage, root=root, decisions={1}, config_fields=fields)


def test_repository_is_up_to_date(gen_docs, repo_root):
    assert gen_docs.check(repo_root, strict=False) == []


def test_generator_imports_neither_torch_nor_a_plugin(repo_root):
    code = (
        "import runpy, sys; sys.argv = ['gen_docs.py', '--check']\n"
        "try: runpy.run_path('scripts/gen_docs.py', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in {'torch', 'oasr_ctc', 'oasr_conformer'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=repo_root, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ('"S1.a" = { says = "x" }', "has no evidence"),
        ('"S2.a" = { says = "x", issue = 3 }', "stands in section S1"),
        ('"S1.a" = { says = "x", issue = 9 }', "issue 9 is not listed"),
        ('"S1.a" = { says = "x", decision = [1, 2] }', "decision 2 is not in"),
        ('"S1.a" = { says = "x", test = ["tests/none.py::test_x"] }', "there is no file tests/none.py"),
        ('"S1.a" = { says = "x", test = ["test_here.py::test_y"] }', "test_here.py defines no test_y"),
        ('"S1.a" = { says = "x", test = ["test_here.py::TestA::test_x"] }', "defines no TestA::test_x"),
        ('"S1.a" = { says = "x", test = ["test_here.py::TestA"] }', "is not a test function"),
    ],
)
def test_a_wrong_row_is_named(gen_docs, coverage_of, tmp_path, row, fault):
    (tmp_path / "test_here.py").write_text("def test_x(): ...\nclass TestA:\n    def test_in_class(self): ...\n")
    (found,) = faults(gen_docs, coverage_of(row), tmp_path)
    assert found.startswith(row.split('"')[1])
    assert fault in found


def test_right_rows_pass(gen_docs, coverage_of, tmp_path):
    (tmp_path / "test_here.py").write_text("def test_x(): ...\nclass TestA:\n    async def test_in_class(self): ...\n")
    rows = """
"S1.a" = { says = "x", test = ["test_here.py::test_x", "test_here.py::TestA::test_in_class[one-2]"] }
"S1.b" = { says = "x", test = ["todo"], issue = "later", decision = [1] }
"S1.c" = { says = "x", issue = 3 }"""
    assert faults(gen_docs, coverage_of(rows), tmp_path) == []


def test_every_config_field_needs_a_row(gen_docs, coverage_of, tmp_path):
    coverage = coverage_of('"S6.cache.chunk" = { says = "x", issue = 3 }', key="S6.cache")
    (found,) = faults(gen_docs, coverage, tmp_path, ["chunk", "width"])
    assert found.startswith("EngineConfig.width has no row")


def test_an_id_used_in_two_sections_is_named(gen_docs, tmp_path):
    row = gen_docs.Row("S1.a", "x", issue=3)
    coverage = gen_docs.Coverage({3: ""}, (gen_docs.Section("S1", "", (row,)), gen_docs.Section("S1", "", (row,))))
    assert "S1.a: the id is used 2 times" in faults(gen_docs, coverage, tmp_path)


@pytest.mark.parametrize("row", ['"S1.a" = { issue = 3 }', '"S1.a" = { says = "x", tests = ["todo"] }'])
def test_a_row_of_wrong_shape_is_refused(coverage_of, row):
    with pytest.raises(ValueError, match=r"S1\.a"):
        coverage_of(row)


def test_stale_file_is_named(gen_docs, repo_root, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("coverage.toml", "coverage.md", "config.md", "errors.md", "plugins.md"):
        (docs / name).write_text((repo_root / "docs" / name).read_text(encoding="utf-8"), encoding="utf-8")
    assert gen_docs.stale_files(tmp_path) == []
    (docs / "errors.md").write_text("old", encoding="utf-8")
    (docs / "config.md").unlink()
    assert {path.name for path in gen_docs.stale_files(tmp_path)} == {"errors.md", "config.md"}


def test_every_table_has_as_many_cells_as_its_head(repo_root):
    for path in sorted((repo_root / "docs").glob("*.md")):
        width = None
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.startswith("|"):
                width = None
                continue
            cells = line.replace("\\|", "").count("|")
            assert width in (None, cells), f"{path.name}:{number} has {cells - 1} cells, its head {width - 1}"
            width = cells


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (int, "int"),
        (str | None, "str | None"),
        (list[int] | None, "list[int] | None"),
        (dict[str, Any], "dict[str, Any]"),
        (None | bool, "None | bool"),
    ],
)
def test_types_read_as_written(gen_docs, annotation, text):
    assert gen_docs.type_text(annotation) == text


def test_markers_must_be_there(gen_docs):
    text = "a\n<!-- begin axes -->\nold\n<!-- end axes -->\nb\n"
    assert gen_docs.between_markers(text, "axes", "new\n") == "a\n<!-- begin axes -->\nnew\n<!-- end axes -->\nb\n"
    with pytest.raises(ValueError, match="begin axes"):
        gen_docs.between_markers("nothing", "axes", "new\n")


def test_decision_numbers_are_stable_and_unique(gen_docs, repo_root):
    text = (repo_root / "docs" / "decisions.md").read_text(encoding="utf-8")
    first_cells = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    numbers = [int(cell) for cell in first_cells if cell.isdigit()]
    assert numbers == sorted(set(numbers))
    assert gen_docs.decision_numbers(text) == set(numbers)
    assert numbers == list(range(1, len(numbers) + 1))
