"""Run the notebooks and save their outputs, so that GitHub and the site show them.

    python notebooks/run.py                        # all notebooks
    python notebooks/run.py notebooks/tour.ipynb

The script drops standard error (progress bars, warnings) and execution times. Tests run the notebooks with smaller
sizes, which they set in the cell with the tag `parameters`, and do not save them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all in this folder")
    for path in parser.parse_args(argv).notebooks or sorted(FOLDER.glob("*.ipynb")):
        if not path.is_file():
            parser.error(f"no such notebook: {path}")
        notebook = nbformat.read(path, as_version=4)
        run(notebook, path.parent)
        nbformat.write(notebook, path)


def run(notebook: nbformat.NotebookNode, folder: Path, seconds_a_cell: int = 1800) -> None:
    """Execute all cells with `folder` as the working directory, and store their outputs in `notebook`.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=seconds_a_cell, kernel_name="python3", resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


if __name__ == "__main__":
    main()
