"""`python -m fastload` is the `fastload` command."""

from __future__ import annotations

from fastload.cli.main import main

if __name__ == "__main__":
    main()
