"""Run the notebooks and save their outputs, so that GitHub and the site show them.

    python scripts/run_notebooks.py                        # all of notebooks/
    python scripts/run_notebooks.py notebooks/tour.ipynb

Standard error (progress bars, warnings) and execution times are not kept. Tests run the notebooks with smaller sizes,
which they set in the cell with the tag `parameters`, and do not save them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from medusa.errors import RequestError
from script_tools import run_script, script_parser

ROOT = Path(__file__).resolve().parents[1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of notebooks/")
    for path in parser.parse_args(argv).notebooks or sorted((ROOT / "notebooks").glob("*.ipynb")):
        if not path.is_file():
            raise RequestError(f"no such notebook: {path}")
        notebook = nbformat.read(path, as_version=4)
        run(notebook, path.parent)
        nbformat.write(notebook, path)


def run(notebook: nbformat.NotebookNode, folder: Path, seconds_a_cell: int = 1800) -> None:
    """Execute all cells in `folder`; `notebook` then holds their outputs.

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
    run_script(main)
