"""`python -m toolscale` is `python data_gen.py`."""

import sys

from .pipeline import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
