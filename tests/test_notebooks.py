"""The notebooks run from top to bottom at reduced size, and their saved outputs are small and without errors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers import module_of

nbformat = pytest.importorskip("nbformat", reason="needs nbclient, of the dev extra")
pytest.importorskip("nbclient", reason="needs nbclient, of the dev extra")
pytest.importorskip("ipykernel", reason="needs ipykernel, of the dev extra")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SMALLER = {"tour": "new_tokens = 24", "train": "texts, steps, prompts = 4, 2, 1", "trellis": "texts, steps = 4, 2"}


@pytest.mark.slow
@pytest.mark.timeout(900)  # seconds on a free machine
def test_notebooks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All notebooks share one kernel, as imports take most of the time."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    together = nbformat.v4.new_notebook()
    reduced = set()
    for path in NOTEBOOKS:
        for cell in nbformat.read(path, as_version=4).cells:
            if "parameters" in cell.metadata.get("tags", ()):
                names = [line.partition("=")[0] for line in (cell.source, SMALLER[path.stem])]
                assert names[0] == names[1]
                cell.source = SMALLER[path.stem]
                reduced.add(path.stem)
            cell.id = f"{path.stem}-{cell.id}"
            together.cells.append(cell)
    assert reduced == set(SMALLER)
    module_of(ROOT / "notebooks" / "run.py").run(together, tmp_path)
    told = "".join(output.get("text", "") for cell in together.cells for output in cell.get("outputs", ()))
    assert "a step" in told
    assert "the same logits, node for node" in told
    assert "nodes taken: [0" in told
    assert "the same drafts in all" in told


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_saved_notebooks_are_complete_and_small(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < 60_000
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run notebooks/run.py"
    for cell in code:
        assert all(output.output_type != "error" and output.get("name") != "stderr" for output in cell.outputs)
