"""Make the Markdown table and the plot of a record.

usage: python benchmarks/report.py NAME [NAME …]    (reads benchmarks/NAME.json, writes NAME.md and NAME.png beside it)
"""

from __future__ import annotations

import pathlib
import sys

from tk_core.bench import records


def main() -> None:
    """Write table and plot of each record."""
    here = pathlib.Path(__file__).parent
    for name in sys.argv[1:]:
        rows = records.read(here / f"{name}.json")
        (here / f"{name}.md").write_text(records.markdown(rows))
        records.plot(here / f"{name}.png", rows)


if __name__ == "__main__":
    main()
