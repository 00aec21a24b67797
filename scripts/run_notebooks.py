"""Run the notebooks and save what comes out, so that GitHub and the site show it.

    python scripts/run_notebooks.py                        # all of notebooks/
    python scripts/run_notebooks.py notebooks/tour.ipynb

What goes to standard error (progress bars, warnings) is not kept, nor are times of execution. Tests run the notebooks
smaller, without saving: a cell with the tag `parameters` holds their sizes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of notebooks/")
    for path in parser.parse_args().notebooks or sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        run(notebook, path.parent)
        nbformat.write(notebook, path)


def run(notebook: Any, folder: Path, seconds_a_cell: int = 1800) -> None:
    """Execute all cells in `folder`; outputs stay in `notebook`, tidied.

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
