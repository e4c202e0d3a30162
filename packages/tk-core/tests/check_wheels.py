"""Check built wheels both ways: everything of the source tree is in, and nothing else is.

usage: python check_wheels.py DIST
"""

from __future__ import annotations

import pathlib
import sys
import zipfile

PACKAGES = pathlib.Path(__file__).parents[2]
KEEP = {".py", ".h", ".cpp", ".json", ".typed"}


def check(wheel: pathlib.Path, source: pathlib.Path) -> list[str]:
    """What is missing from a wheel, and what should not be in it."""
    expected = {str(p.relative_to(source)) for p in source.rglob("*") if p.suffix in KEEP or p.name == "py.typed"}
    with zipfile.ZipFile(wheel) as archive:
        got = {n for n in archive.namelist() if ".dist-info/" not in n and not n.endswith("/")}
    missing = [f"{wheel.name} lacks {name}" for name in sorted(expected - got)]
    return missing + [f"{wheel.name} should not hold {name}" for name in sorted(got - expected)]


def main() -> None:
    """Check every wheel of a folder."""
    problems: list[str] = []
    for name in ("tk-core", "tk-cuda", "tk-ascend"):
        module = name.replace("-", "_")
        wheels = list(pathlib.Path(sys.argv[1]).glob(f"{module}-*.whl"))
        if len(wheels) != 1:
            problems.append(f"expected one wheel of {name}, got {[w.name for w in wheels]}")
            continue
        problems += check(wheels[0], PACKAGES / name / "src")
    print("\n".join(problems) or "wheels hold exactly the source tree")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
