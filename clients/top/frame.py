"""One frame of the dashboard: a pure function of what is known, the time, and the terminal's size."""

from __future__ import annotations

import time as clock
from collections.abc import Sequence

from rich.text import Text

from clients.top.glyphs import bar, curve, large
from clients.top.state import SPAN_S, TopState
from rlcore.feed import Change, Sample, ShareSample

NARROW = 60
"""Columns below which labels are short."""

LOW = 20
"""Rows below which the positions share one line."""

SHORTEST_SPAN_S = 60.0
"""That a curve covers, however little is known."""

STALE_S = 5.0
"""Without a sample for so long, a feed that is open is said to be silent."""

LABEL = {True: 9, False: 19}
"""Width of the first column, by whether the terminal is narrow."""

VALUE = 8
"""Width of a number before its curve."""

UNKNOWN = "-"


def frame(state: TopState, width: int, height: int | None, now: float) -> list[Text]:
    """At most ``height`` lines, none wider than ``width`` columns. ``now``: seconds since the epoch.

    Without ``height`` everything is shown. What matters least comes last and is cut first.
    """
    lines = [_heading(state, width, now)]
    sample = state.sample
    if sample is not None:
        lines += _figures(state, sample, width, height)
        room = None if height is None else max(0, height - len(lines))
        lines += _tables(state, sample, width, room)
    lines = lines if height is None else lines[:height]
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return lines


def _heading(state: TopState, width: int, now: float) -> Text:
    if state.link == "lost":
        return Text(f"no connection: {state.reason}; trying again", style="bold red")
    if state.sample is None:
        return Text(f"connecting to {state.url}", style="bold")
    silent = now - state.sample.time
    right = f"silent for {silent:.0f} s" if silent > STALE_S else _time(state.sample.time)
    name = state.target if width < NARROW else f"{state.target}, {state.method}"
    space = width - len(right) - 2
    left = Text(name, style="bold", no_wrap=True)
    left.truncate(max(1, space), overflow="ellipsis", pad=True)
    return left.append("  ").append(right, style="red" if silent > STALE_S else "dim")


def _figures(state: TopState, sample: Sample, width: int, height: int | None) -> list[Text]:
    narrow = width < NARROW
    lines = [Text(), *_speedup(sample, narrow)]
    lines += _curves(state, sample, width)
    lines += _positions(sample, width, one_line=height is not None and height < LOW)
    drafts, learner, traces = sample.drafts, sample.learner, sample.traces
    lines += _facts(
        "drafts" if narrow else "drafts a step (K)",
        [f"{_number(drafts.mean)} mean", f"{_count(drafts.now)} now", f"at most {drafts.most}"],
        width,
    )
    version = f"draft {sample.draft_version}"
    lines += _facts("versions", [version, f"policy {sample.policy_version}"], width)
    if sample.draft_collapsed:
        lines[-1].append("  nothing it drafts is accepted", style="bold red")
    busy = UNKNOWN if sample.busy is None else f"{sample.busy:.0%}"
    lines += _facts(
        "requests",
        [f"{sample.running} running", f"{sample.waiting} waiting", f"engine {busy} busy"],
        width,
    )
    facts: list[str] = [learner.state]
    if learner.state not in ("off", "away"):
        facts += [
            f"{learner.updates:,} updates",
            f"loss {_number(learner.loss)}",
            f"candidate {_number(learner.candidate_length)} to live {_number(learner.live_length)}",
            f"{learner.published} published of {learner.judged} judged",
            f"replay {learner.replay_tokens:,}",
            f"held out {learner.heldout_tokens:,}",
        ]
    lines += _facts("learner", facts, width)
    facts = [
        f"{traces.sent:,} of {traces.captured:,} sent",
        f"{_reasons(traces.dropped)} dropped",
        f"{traces.received:,} received",
        f"{_reasons(traces.refused)} refused",
    ]
    lines += _facts("traces", facts, width)
    if state.link == "lost":
        for line in lines:
            line.stylize("dim")
    return lines


def _speedup(sample: Sample, narrow: bool) -> list[Text]:
    """The one large number, and beside it what it is made of."""
    speedup = sample.speedup
    if speedup is None:
        rows, style = large(UNKNOWN), "dim"
    else:
        rows, style = large(f"{speedup:.2f}x"), "bold green" if speedup >= 1 else "bold yellow"
    plain = _number(sample.plain_tokens_per_s, 1)
    beside = [
        "speed-up not known" if speedup is None else "speed-up",
        f"{sample.tokens_per_s:.1f} tokens/s",
        f"{plain} undrafted" if narrow else f"{plain} tokens/s without drafts (estimate)",
    ]
    return [
        Text(" ").append(row, style=style).append(f"   {text}")
        for row, text in zip(rows, beside, strict=True)
    ]


def _curves(state: TopState, sample: Sample, width: int) -> list[Text]:
    narrow = width < NARROW
    age = sample.time - state.samples[0].time
    span = min(SPAN_S, max(SHORTEST_SPAN_S, age))
    heading = f"last {span / 60:.0f} min" if span >= 2 * SHORTEST_SPAN_S else f"last {span:.0f} s"
    lines = [Text(" " * (LABEL[narrow] + VALUE) + heading, style="dim")]
    lengths = [(s.time, s.acceptance_length) for s in state.samples]
    rates = [(s.time, s.tokens_per_s) for s in state.samples]
    for label, short, value, points, low, style in (
        ("acceptance length", "length", _number(sample.acceptance_length), lengths, 1.0, "cyan"),
        ("tokens/s", "tokens/s", f"{sample.tokens_per_s:.1f}", rates, 0.0, "green"),
    ):
        line = _label(short if narrow else label, narrow).append(f"{value:>{VALUE - 1}} ")
        drawn = curve(points, width - len(line), end=sample.time, span=span, low=low)
        lines.append(line.append(drawn, style=style))
    return lines


def _positions(sample: Sample, width: int, one_line: bool) -> list[Text]:
    narrow = width < NARROW
    label = "accepted" if narrow else "accepted, position"
    shares = sample.acceptance
    if one_line or not shares:
        known = [UNKNOWN if share is None else f"{share:.0%}" for share in shares]
        return [_label(label, narrow).append("  ".join(known) or UNKNOWN)]
    lines = []
    for i, share in enumerate(shares):
        line = _label(label if i == 0 else "", narrow).append(f"{i + 1:>2} ")
        percent = f" {UNKNOWN if share is None else f'{share:.0%}':>4}"
        drawn = bar(share or 0.0, max(1, min(40, width - len(line) - len(percent))))
        lines.append(line.append(drawn, style="cyan").append(percent))
    return lines


def _tables(state: TopState, sample: Sample, width: int, room: int | None) -> list[Text]:
    """Last changes, and tenants and adapters: half the room each, more where the other needs less."""
    narrow = width < NARROW
    changes = [_change(change, narrow) for change in reversed(state.changes)]
    shares = [
        *_rows("tenants", _shares(sample.tenants), narrow),
        *_rows("adapters", _shares(sample.adapters), narrow),
    ]
    if room is not None:
        changes = changes[: room - min(len(shares), room // 2)]
    return [*_rows("changes", changes, narrow), *shares]


def _rows(label: str, rows: Sequence[Text], narrow: bool) -> list[Text]:
    return [_label(label if i == 0 else "", narrow).append(row) for i, row in enumerate(rows)]


def _change(change: Change, narrow: bool) -> Text:
    text = Text.assemble((f"{_time(change.time)} ", "dim"))
    style = {"rollback": "bold yellow", "drift": "bold magenta"}.get(change.kind, "bold")
    text.append(change.kind, style=style)
    if change.version is not None:
        before = "" if change.before is None else f"{change.before} to "
        text.append(f" {before}{change.version}")
    why = change.reason or change.cause
    return text.append(f"  {why}", style="dim") if why and not narrow else text


def _shares(shares: Sequence[ShareSample]) -> list[Text]:
    longest = max((len(share.name) for share in shares), default=0)
    return [
        Text(
            f"{share.name:<{longest}}  {share.tokens_per_s:6.1f} tokens/s, "
            f"length {_number(share.acceptance_length)}, {share.running} running, "
            f"{share.traces:,} traces, {share.tokens:,} tokens"
        )
        for share in shares
    ]


def _label(text: str, narrow: bool) -> Text:
    return Text.assemble((f"{text:<{LABEL[narrow]}}", "bold"))


def _facts(label: str, facts: Sequence[str], width: int) -> list[Text]:
    """Comma-separated, on as many lines as they need."""
    narrow = width < NARROW
    lines = [_label(label, narrow)]
    for i, fact in enumerate(facts):
        more = "," if i + 1 < len(facts) else ""
        started = len(lines[-1]) > LABEL[narrow]
        if started and len(lines[-1]) + 1 + len(fact) + len(more) > width:
            lines.append(_label("", narrow))
            started = False
        lines[-1].append(f"{' ' if started else ''}{fact}{more}")
    return lines


def _reasons(counts: dict[str, int]) -> str:
    total = f"{sum(counts.values()):,}"
    if not counts:
        return total
    largest = sorted(counts, key=lambda reason: -counts[reason])[:2]
    return f"{total} ({', '.join(f'{reason} {counts[reason]:,}' for reason in largest)})"


def _number(value: float | None, digits: int = 2) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def _count(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def _time(seconds: float) -> str:
    return clock.strftime("%H:%M:%S", clock.localtime(seconds))
