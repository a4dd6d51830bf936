"""``python -m stretto.cli`` is the ``stretto`` command (for ``torchrun -m``)."""

from stretto.cli.application import main

if __name__ == "__main__":
    main()
