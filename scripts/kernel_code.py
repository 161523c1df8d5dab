"""The command `python -m scripts.kernel_code`; what it does is in scripts/bench/kernel_code.py."""

from scripts.bench.kernel_code import main

if __name__ == "__main__":
    main()
