"""The ``kvoffload`` command, with one module per subcommand. HTML pages need the extra ``plots``."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click

EXTRA = ("jinja2", "matplotlib")
EXAMPLES = {
    "disk inspect": ("disk inspect /var/cache/kvoffload", "disk inspect /var/cache/kvoffload --json"),
    "disk verify": ("disk verify /var/cache/kvoffload", "disk verify /var/cache/kvoffload --json"),
    "disk clear": ("disk clear /var/cache/kvoffload", "disk clear /var/cache/kvoffload --yes"),
    "doctor": ("doctor --config kv.json", 'doctor --config \'{"host_bytes": "64GiB"}\' --model config.json'),
    "explain": ("explain --last 15m", "explain server.log"),
    "replay": ("replay trace.jsonl --capacity 16GiB,64GiB", "replay trace.jsonl --policy lru,arc --html page.html"),
    "size": ("size trace.jsonl --ram 16GiB,64GiB", "size trace.jsonl --ram 64GiB --disk 500GiB --html page.html"),
    "usage": ("usage --tenant search", "usage --pid 4711 --json"),
}
"""Two lines for the help of each command."""


def main() -> None:
    """The console entry point. Exits with status 2 and one line if a command needs the extra and it is missing."""
    try:
        group()(prog_name="kvoffload")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in EXTRA:
            raise
        print(
            f"kvoffload: plots need {error.name}, which is not installed; run pip install " + " ".join(EXTRA),
            file=sys.stderr,
        )
        sys.exit(2)


def group() -> click.Group:
    """Returns the command with its subcommands."""
    import click

    from kvoffload.cli.disk import disk
    from kvoffload.cli.doctor import doctor
    from kvoffload.cli.explain import explain
    from kvoffload.cli.replay import replay
    from kvoffload.cli.size import size
    from kvoffload.cli.usage import usage
    from kvoffload.native import describe

    for name, lines in EXAMPLES.items():
        first, _, rest = name.partition(" ")
        of = {each.name: each for each in (disk, doctor, explain, replay, size, usage)}[first]
        command = disk.commands[rest] if rest else of
        command.epilog = "\b\nExamples:\n" + "\n".join(f"  kvoffload {line}" for line in lines)
    commands = click.Group(
        "kvoffload",
        commands=[disk, doctor, explain, replay, size, usage],
        help="Tools for the KV cache that an LLM server keeps in host memory, on disk and in shared stores.",
        # Subcommands inherit it.
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    return click.version_option(metadata.version("kvoffload"), message=f"%(prog)s %(version)s ({describe()})")(commands)
