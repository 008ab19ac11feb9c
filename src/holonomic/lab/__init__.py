"""The lab: the papers' experiments, run for real. It imports the library, never the reverse."""


def main() -> None:
    """The command `holonomic`."""
    try:
        from holonomic.lab.cli import main
    except ImportError as error:
        raise SystemExit(
            f"the command line needs more packages ({error.name} is missing): "
            f'pip install "holonomic[lab]"'
        ) from None
    main()
