"""`cplus` and `python -m cplus`: the command line, whose own imports may be interrupted too."""

import logging
import sys


def main() -> None:
    """Run the command line; Ctrl-C ends it with exit code 130 and no traceback, even while it is being imported."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of kernels that no job here needs
    try:
        from cplus.cli.app import main as run

        run()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
