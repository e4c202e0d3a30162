"""The prose stays true: code of the README runs, links lead somewhere, commands exist."""

from __future__ import annotations

import pathlib
import re

import pytest

from tk_core.op import OPERATORS

ROOT = pathlib.Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_the_example_of_the_readme_runs():
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    x, y, weights = names["x"], names["y"], names["weights"]
    assert (x.float() - y.float()).norm() / x.float().norm() < 0.04
    assert (weights.sum(1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: pathlib.Path):
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_nox_sessions_exist(page: pathlib.Path):
    sessions = set(re.findall(r"@nox\.session\ndef (\w+)", (ROOT / "noxfile.py").read_text()))
    named = {word for line in re.findall(r"nox -s ([a-z ]+)", page.read_text()) for word in line.split()[:1]}
    assert named <= sessions


def test_operators_that_pages_name_exist():
    known = set(OPERATORS)
    families = "|".join({name.partition(".")[0] for name in known})
    named = set(re.findall(rf"`((?:{families})\.[a-z0-9_]+)`", "".join(p.read_text() for p in PAGES)))
    assert named
    assert named <= known
