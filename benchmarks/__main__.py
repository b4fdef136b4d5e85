"""``python -m benchmarks``: see ``benchmarks.comparing.command``."""

from benchmarks.comparing.command import main

if __name__ == "__main__":  # processes that compile import this again under another name
    raise SystemExit(main())
