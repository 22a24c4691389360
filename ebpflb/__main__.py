"""``python -m ebpflb``: the same as the ``ebpflb`` command."""

from ebpflb.cli import main

if __name__ == "__main__":
    main()
