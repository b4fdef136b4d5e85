"""``python -m kernelseam``: the command ``kernelseam``."""

from kernelseam.cli.main import main

if __name__ == "__main__":
    main()
