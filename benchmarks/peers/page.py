"""Renders ``peers.html``, which needs no other file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.peers.measure import Result
from benchmarks.peers.plots import memory_plot, mixed_plot, ttft_plot
from benchmarks.peers.report import problems, tables
from benchmarks.peers.summary import shortfalls
from kvoffload.lab.page import environment

LEGEND = (
    "Again and first sight: median time to the first token, by that of a device hit and by that of recompute. Mixed "
    "load and CPU time: by recompute's. Disk: bytes on disk per byte of blocks."
)
TEMPLATE = """{% extends "frame.html.j2" %}
{% macro section(title, heads, rows) %}
<section>
<h2>{{ title }}</h2>
<div class="scroll"><table>
<tr>{% for head in heads %}<th>{{ head }}</th>{% endfor %}</tr>
{% for row in rows %}
<tr>{% for cell in row %}<td>{% if cell.startswith("**") %}<b>{{ cell[2:-2] }}</b>{% else %}{{ cell }}{% endif %}</td>
{% endfor %}</tr>
{% endfor %}
</table></div>
</section>
{% endmacro %}
{% block title %}beside other systems{% endblock %}
{% block style %}
main { max-width: 1080px; }
th, td { padding-left: 12px; white-space: normal; }
{% endblock %}
{% block main %}
<h1>kvoffload beside other systems</h1>
<p class="lead">{% for name, value in facts.items() %}{{ name }}: {{ value }}{{ "; " if not loop.last }}{% endfor %}</p>
{% for title, heads, rows in tables[:1] %}
{{ section(title, heads, rows) }}
{% endfor %}
<p class="note">{{ legend }}</p>
{% if shortfalls %}
<section><h2>Where kvoffload is not the best</h2>
<ul>{% for line in shortfalls %}<li>{{ line }}</li>{% endfor %}</ul></section>
{% endif %}
{% for plot in plots if plot %}
<section><div class="scroll">{{ plot | safe }}</div></section>
{% endfor %}
{% for title, heads, rows in tables[1:] %}
{{ section(title, heads, rows) }}
{% endfor %}
{% for problem in problems %}
<p class="note">{{ problem }}</p>
{% endfor %}
{% endblock %}
"""


def render_page(results: Sequence[Result], facts: Mapping[str, str]) -> str:
    """Returns all tables and plots as one HTML page."""
    measured = [result for result in results if result.times]
    plots = [ttft_plot(measured), mixed_plot(measured), memory_plot(measured)] if measured else []
    return (
        environment("kvoffload.lab")
        .from_string(TEMPLATE)
        .render(
            facts=facts,
            legend=LEGEND,
            plots=plots,
            tables=tables(results),
            shortfalls=shortfalls(results),
            problems=problems(results),
        )
    )
