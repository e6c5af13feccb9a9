"""Makes ToolScale worlds and tasks: `python data_gen.py --tasks 10000 --seed 1 --out data/`."""

from __future__ import annotations

import sys

from worlds.toolscale.pipeline import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
