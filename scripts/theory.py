"""`python -m scripts.theory`: the numbers behind the paper's theory, in scripts/reproduce/theory.py."""

from scripts.reproduce.theory import main

if __name__ == "__main__":
    main()
