"""Renders the report of a replay: one HTML page that needs no other file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import jinja2

from kvoffload.lab.figures import DARK, LIGHT
from kvoffload.lab.latency import Speeds
from kvoffload.lab.model import ModelShape
from kvoffload.lab.plots import MAX_BARS, curve_plot, misses_plot, name_of, tiers_plot
from kvoffload.lab.replay import CLAIRVOYANT, ReplayResult
from kvoffload.lab.trace import Trace
from kvoffload.units import age, counted, format_bytes


def environment(package: str) -> jinja2.Environment:
    """Returns what renders the templates of ``package``, in the frame and style that all pages have."""
    packages = dict.fromkeys((package, "kvoffload.lab"))
    made = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name, "templates") for name in packages]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.globals |= {"version": metadata.version("kvoffload"), "palettes": {"light": LIGHT, "dark": DARK}}
    return made


def render(template: str, trace: Trace, model: ModelShape, footprint_bytes: int, **more: Any) -> str:
    """Returns the page that ``template`` makes about ``trace``, which must have requests. ``more``: other variables of
    the template."""
    return (
        environment("kvoffload.lab")
        .get_template(template)
        .render(
            trace=trace,
            model=model,
            prompt_tokens=int(trace.input_tokens.sum()),
            span=age(float(trace.times[-1] - trace.times[0])),
            footprint=format_bytes(footprint_bytes),
            token_size=format_bytes(round(model.bytes_per_token)),
            format_bytes=format_bytes,
            counted=counted,
            **more,
        )
    )


def render_page(trace: Trace, model: ModelShape, speeds: Speeds, results: Sequence[ReplayResult]) -> str:
    """Returns the page about ``results``, at least one, of replays of ``trace``."""
    ordered = sorted(results, key=lambda result: (result.capacity_blocks, result.policy == CLAIRVOYANT))
    block_bytes = trace.block_tokens * model.bytes_per_token

    def size_of(blocks: int) -> str:
        return format_bytes(int(blocks * block_bytes))

    def plot(
        results: Sequence[ReplayResult], value: Callable[[ReplayResult], float], unit: str, what: str
    ) -> str | None:
        # A curve has more than one point. The bars and the table have the figures of a single capacity.
        is_curve = len({result.capacity_blocks for result in results}) > 1
        return curve_plot(results, value, unit, size_of, what) if is_curve else None

    real = [result for result in ordered if result.policy != CLAIRVOYANT]
    return render(
        "replay.html.j2",
        trace,
        model,
        int(trace.num_distinct * block_bytes),
        speeds=speeds,
        results=ordered,
        best=max(real or ordered, key=lambda result: result.prefix_hit_tokens),
        size_of=size_of,
        name_of=name_of,
        hits_svg=plot(ordered, lambda result: result.prefix_hit_tokens_pct, "%", "Prefix-hit tokens by capacity"),
        writes_svg=plot(real or ordered, lambda result: result.writes_per_access, "", "Blocks written per access"),
        tiers_svg=tiers_plot(ordered) if len(ordered) <= MAX_BARS else None,
        misses_svg=misses_plot(ordered) if len(ordered) <= MAX_BARS else None,
        max_bars=MAX_BARS,
    )
