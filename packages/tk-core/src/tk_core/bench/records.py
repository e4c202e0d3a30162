"""Benchmark records: JSON in, a Markdown table and a plot out; and the comparison of two records."""

from __future__ import annotations

import json
import pathlib
from typing import Any

NEUTRAL = 0.05
"""Relative differences below this are noise."""
NEUTRAL_US = 0.5
"""And so are absolute ones below this many microseconds."""

Rows = list[dict[str, Any]]


def write(path: pathlib.Path, rows: Rows) -> None:
    """Write rows as JSON, one on a line."""
    path.write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")


def read(path: pathlib.Path) -> Rows:
    """Read rows."""
    return json.loads(path.read_text())


def best_other(rows: Rows, row: dict[str, Any]) -> dict[str, Any] | None:
    """The fastest other candidate at the point of a row whose results equal the reference's."""
    same = [
        r
        for r in rows
        if (r["op"], r["point"]) == (row["op"], row["point"])
        and r["candidate"] != "tk"
        and "device_us" in r
        and r["against_reference"] == "equal"
    ]
    return min(same, key=lambda r: r["device_us"][0], default=None)


def markdown(rows: Rows) -> str:
    """The table of a record: tk's rows, each beside the best other candidate."""
    first = rows[0]
    versions = ", ".join(f"{k} {first[k]}" for k in ("torch", "cuda", "tilelang") if first.get(k))
    how = (
        f"Device copy {first['copy_gbps'] / 1e3:.2f} TB/s (read + written) in the same run. Device time is the median "
        "of CUDA-graph replays over buffers that rotate past the L2 cache; cold time is a single launch with the L2 "
        "flushed; host time is the enqueue of an eager call."
        if first.get("cuda")
        else "These are times of the PyTorch reference on a CPU, not of kernels."
    )
    lines = [
        f"# {first['device']}, backend {first['backend']} {first['backend_version']}, {first['date'][:10]}",
        "",
        f"{versions}. {how}",
        "",
        "| operator | point | device us | of copy | cold us | host us | best other | its device us | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in (r for r in rows if r["candidate"] == "tk"):
        if "error" in row:
            lines.append(f"| {row['op']} | {row['point']} | {row['error']} | | | | | | |")
            continue
        other = best_other(rows, row)
        name, time, ratio = "", "", ""
        if other is not None:
            name, time = f"{other['candidate']} {other['candidate_version']}", f"{other['device_us'][0]:.2f}"
            ratio = f"{other['device_us'][0] / row['device_us'][0]:.2f}"
        lines.append(
            f"| {row['op']} | {row['point']} | {row['device_us'][0]:.2f} | {row['share_of_copy']:.0%} | "
            f"{row['cold_us'][0]:.1f} | {row['host_us'][0]:.1f} | {name} | {time} | {ratio} |"
        )
    calls = first_calls(rows)
    return "\n".join([*lines, *(["", *calls] if calls else [])]) + "\n"


def first_calls(rows: Rows) -> list[str]:
    """A Markdown table of the first calls of a process, where they were timed."""
    timed = [r for r in rows if "first_call_ms" in r]
    if not timed:
        return []
    return [
        "| first call in a process of | warm cache, ms | empty cache, ms |",
        "|---|---|---|",
        *(
            f"| {r['op']}{' (first of the process)' if r['first_call_ms']['first_of_process'] else ''} | "
            f"{r['first_call_ms']['warm']:.1f} | {r['first_call_ms']['cold']:.0f} |"
            for r in timed
        ),
    ]


def plot(path: pathlib.Path, rows: Rows) -> None:
    """Bars of device time relative to the bytes' floor, tk beside the best other candidate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ours = [r for r in rows if r["candidate"] == "tk" and "device_us" in r]
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.28 * len(ours)))
    for i, row in enumerate(reversed(ours)):
        other = best_other(rows, row)
        axes.barh(i + 0.2, row["share_of_copy"] * 100, 0.38, color="#1f77b4", label="tk" if i == 0 else None)
        if other is not None:
            axes.barh(
                i - 0.2, other["share_of_copy"] * 100, 0.38, color="#bbbbbb", label="best other" if i == 0 else None
            )
    axes.set_yticks(range(len(ours)), [f"{r['op'].partition('.')[2]} {r['point']}" for r in reversed(ours)], fontsize=7)
    axes.set_xlabel("share of the copy rate, %")
    axes.axvline(100, color="black", linewidth=0.6)
    if ours:
        axes.legend(loc="lower right")
        axes.set_title(f"{ours[0]['device']}, tk {ours[0]['backend_version']}")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def compare(before: Rows, after: Rows) -> list[tuple[str, float, float, str]]:
    """Points of both records with the verdict: faster, slower, or neutral inside the noise zone."""
    known = {(r["op"], r["point"]): r["device_us"][0] for r in before if r["candidate"] == "tk" and "device_us" in r}
    result = []
    for row in after:
        key = (row["op"], row["point"])
        if row["candidate"] != "tk" or "device_us" not in row or key not in known:
            continue
        old, new = known[key], row["device_us"][0]
        small = abs(new - old) <= max(NEUTRAL * old, NEUTRAL_US)
        result.append((f"{key[0]} {key[1]}", old, new, "neutral" if small else "faster" if new < old else "slower"))
    return result
