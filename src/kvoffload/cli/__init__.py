"""The ``kvoffload`` command, with one module per subcommand. HTML pages need the extra ``plots``."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click

EXTRA = ("jinja2", "matplotlib")


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

    from kvoffload.cli.convert import convert
    from kvoffload.cli.disk import disk
    from kvoffload.cli.doctor import doctor
    from kvoffload.cli.explain import explain
    from kvoffload.cli.replay import replay
    from kvoffload.cli.size import size
    from kvoffload.cli.usage import usage
    from kvoffload.native import describe

    commands = click.Group(
        "kvoffload",
        commands=[convert, disk, doctor, explain, replay, size, usage],
        help="Tools for the KV cache that an LLM server keeps in host memory, on disk and in shared stores.",
        # Subcommands inherit it.
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    return click.version_option(metadata.version("kvoffload"), message=f"%(prog)s %(version)s ({describe()})")(commands)
