"""``python -m rlbridge``."""

from rlbridge.cli import main

if __name__ == "__main__":
    main()
