"""Entry of the ``smolproxy`` command and of ``python -m smolproxy``."""

from __future__ import annotations


def main() -> None:
    """Run the command line with the arguments of the process, then exit."""
    from smolproxy.cli.main import cli

    cli(prog_name="smolproxy")


if __name__ == "__main__":
    main()
