"""The one build step that pyproject.toml cannot describe: `configs/` becomes `medusa/configs` in the wheel.

A mapping in `package-dir` would do the same, but editable installs would then find our packages only after a folder
`train` of the user's."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Build the packages, and copy the recipes and trees beside them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # an editable install reads the sources' own folder (medusa.shipped)
            for source in sorted(Path("configs").rglob("*.yaml")):
                target = Path(self.build_lib, "medusa", source)
                self.mkpath(str(target.parent))
                self.copy_file(str(source), str(target))


setup(cmdclass={"build_py": BuildWithConfigs})
