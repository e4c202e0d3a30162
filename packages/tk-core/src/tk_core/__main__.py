"""``tk`` and ``python -m tk_core``: errors are one line on standard error and exit code 2."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        needs = "pip install './packages/tk-core[cli]' in the checkout"
        print(f"tk: {error.name} is missing; the command line needs: {needs}", file=sys.stderr)
        sys.exit(2)
    from .cli import UsageError, app
    from .errors import TkError

    try:
        sys.exit(app(sys.argv[1:] or ["--help"], prog_name="tk", standalone_mode=False))
    except (TkError, OSError, UsageError) as error:
        if os.environ.get("TK_TRACEBACK") == "1":
            raise
        text = f"tk: {error}"
        if isinstance(error, UsageError):
            command = error.ctx.command_path if error.ctx is not None else "tk"
            text = f"{command}: {error.format_message().rstrip('.')}; see {command} --help"
        print(text.replace("\n", " "), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
