"""The command `python -m scripts.memory`; what it does is in scripts/bench/memory.py."""

from scripts.bench.memory import main

if __name__ == "__main__":
    main()
