"""Entry of the ``smolproxy`` command and of ``python -m smolproxy``."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line with the arguments of the process, then exit."""
    from smolproxy.cli.main import cli

    try:
        try:
            cli(prog_name="smolproxy")
        finally:
            sys.stdout.flush()
    except OSError as error:  # a full disk; a closed pipe is click's to handle
        print(f"Error: the output cannot be written: {error.strerror}", file=sys.stderr)
        os._exit(1)  # at a normal exit Python would try, and complain, once more


if __name__ == "__main__":
    main()
