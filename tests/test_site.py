"""The site builds without warnings and without a network, and its map lists every script."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.timeout(900)  # the site takes seconds on a free machine


built = pytest.mark.full  # links between pages are tested daily (test_docs.py)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs mkdocs-material, of the docs extra")
    pytest.importorskip("mkdocstrings", reason="needs mkdocstrings, of the docs extra")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder))
    config.plugins.run_event("startup", command="build", dirty=False)
    build(config)  # raises Abort where there was a warning
    return folder


@built
def test_every_page_is_built_and_in_the_menu(site: Path) -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    sources = [*(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    assert len(sources) > 10
    for source in sources:
        name = source.stem if source.suffix == ".md" else f"notebooks/{source.stem}"
        assert (site / f"{name}.html").exists()
        assert f": {name}.md\n" in menu, f"{name} is in no menu of mkdocs.yml"


@built
def test_the_site_fetches_nothing_from_other_hosts(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|img|iframe)[^>]*src=\"https?:", text), page.name
        assert not re.findall(r"<link[^>]*rel=\"(?:stylesheet|preconnect|icon)\"[^>]*href=\"https?:", text), page.name
    for style in site.rglob("*.css"):
        assert not re.findall(r"url\(\s*['\"]?https?:|@import", style.read_text(encoding="utf-8")), style.name


@built
def test_links_out_of_docs_resolve_on_the_site(site: Path) -> None:
    """README becomes the first page, and recipes named in pages are copied as files."""
    home = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="decoding.html#why-it-changes-nothing"' in home
    assert 'href="notebooks/tour.html"' in home
    assert 'src="images/chat.png"' in home
    training = (site / "training.html").read_text(encoding="utf-8")
    (recipe,) = set(re.findall(r'href="(source/configs/medusa2[^"]*)"', training))
    assert (site / recipe).read_bytes() == (ROOT / "configs" / "medusa2.yaml").read_bytes()


@built
def test_saved_tables_of_notebooks_are_shown(site: Path) -> None:
    page = (site / "notebooks" / "train.html").read_text(encoding="utf-8")
    assert re.search(r"<th>times plain decoding</th>\s*<th>times <code>model.generate</code></th>", page)
    assert "IPython.core.display" not in page


@built
def test_the_api_page_has_docstrings(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    for name in ("decode.generate", "medusa.MedusaHeads", "medusa.Tree", "train.MedusaTrainer"):
        assert f'id="{name}"' in page
    assert "with the same arguments and results" in page


def test_every_script_is_on_the_map() -> None:
    around = (ROOT / "docs" / "map.md").read_text(encoding="utf-8").split("### Around the packages")[1]
    for path in (ROOT / "scripts").glob("*.py"):
        assert re.search(rf"\b{path.stem}\b", around), f"scripts/{path.name} is not on docs/map.md"


def test_the_readme_stays_short_and_shows_the_chat_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") < 250
    assert "images/chat.png" in text
