"""The notebooks run from top to bottom at reduced size, and their saved outputs are small and without errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers import module_of

if TYPE_CHECKING:
    from nbformat import NotebookNode

nbformat = pytest.importorskip("nbformat", reason="needs nbclient, of the dev extra")
pytest.importorskip("IPython", reason="needs ipykernel, of the dev extra")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SMALLER = {"tour": "new_tokens = 24", "train": "texts, steps, prompts = 4, 2, 1", "trellis": "texts, steps = 4, 2"}
TOLD = {"tour": "a step", "tree": "the same logits, node for node", "trellis": "the same draft of", "train": ""}
"""What each notebook prints at its end."""


def cells(path: Path) -> Iterator[NotebookNode]:
    """The cells of a notebook, the one with its parameters at reduced size."""
    for cell in nbformat.read(path, as_version=4).cells:
        if "parameters" in cell.metadata.get("tags", ()):
            assert cell.source.partition("=")[0] == SMALLER[path.stem].partition("=")[0]
            cell.source = SMALLER[path.stem]
        yield cell


LONG = ("train", "trellis")  # five CPU seconds or more: they run with --full only


@pytest.mark.full
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.full] * (path.stem in LONG)) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_code_of_notebooks_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process: a kernel imports everything again, which takes most of the time."""
    names = {"__name__": "__main__"}
    for cell in cells(path):
        if cell.cell_type == "code":
            exec(compile(cell.source, path.name, "exec"), names)
    assert TOLD[path.stem] in capsys.readouterr().out


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_saved_outputs_are_those_of_the_code(path: Path) -> None:
    """GitHub and the site show them."""
    saved = [output for cell in cells(path) if cell.cell_type == "code" for output in cell.outputs]
    assert TOLD[path.stem] in "".join(output.get("text", "") for output in saved)


@pytest.mark.full
@pytest.mark.timeout(900)  # seconds on a free machine
def test_notebooks_run_in_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All notebooks share one kernel."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    together = nbformat.v4.new_notebook()
    for path in NOTEBOOKS:
        for cell in cells(path):
            cell.id = f"{path.stem}-{cell.id}"
            together.cells.append(cell)
    module_of(ROOT / "notebooks" / "run.py").run(together, tmp_path)
    told = "".join(output.get("text", "") for cell in together.cells for output in cell.get("outputs", ()))
    assert all(words in told for words in TOLD.values())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_saved_notebooks_are_complete_and_small(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < 60_000
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run notebooks/run.py"
    for cell in code:
        assert all(output.output_type != "error" and output.get("name") != "stderr" for output in cell.outputs)
