"""Names of classes that are imported at first use: those of this project, and those that other packages bring along.

Another package names its classes in an entry-point group (docs/drafters.md). Its entry points are read if somebody asks
for a name that is not known yet, or for all names. An entry point that does not load is never an error by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any, NamedTuple

from medusa.errors import RequestError, choose_one_of, first_line


class Extension(NamedTuple):
    """A class of another package: its name, the package, and why it cannot be used (`None`: it can)."""

    name: str
    package: str
    failure: str | None = None


class Registry:
    """Classes by name, such as the kinds of heads. All of them are subclasses of one base class.

    An iteration gives all names that can be used: those of this project, then those of other packages, which are
    imported only if it comes so far."""

    def __init__(self, group: str, what: str, own: Mapping[str, str], base: str) -> None:
        """Register this project's classes.

        Args:
            group: the entry-point group in which other packages name theirs.
            what: the noun for one of the classes, for messages.
            own: for each name, the place `module:Class`.
            base: the place of the base class. If it has a method `require_registrable`, that can refuse a class."""
        self.group, self.what, self.own, self.base = group, what, dict(own), base
        self._loaded: dict[str, type[Any]] = {}

    def register(self, name: str, found: type[Any]) -> None:
        """Add a class under `name` for this process, without an entry point, such as in a notebook.

        Raise RequestError if the name is taken, or if the class is none of this registry. A class may be registered
        again, also after its definition has been run again."""
        base, known = resolve_name(self.base), self._loaded.get(name)
        if not (isinstance(found, type) and issubclass(found, base)):
            raise RequestError(f"{found!r} is no subclass of {base.__module__}.{base.__name__}")
        again = known is not None and (known.__module__, known.__qualname__) == (found.__module__, found.__qualname__)
        if name in self.own or (known is not None and not again):
            raise RequestError(f"there is a {self.what} {name} already; choose another name")
        if hasattr(found, "require_registrable"):
            found.require_registrable()
        self._loaded[name] = found

    def get(self, name: object, refusal: str = "") -> type[Any]:
        """Return the class with this name; import it at its first use.

        RequestError: there is none, or it does not load. Its message begins with `refusal`."""
        key = name if isinstance(name, str) else ""
        if key in self.own and key not in self._loaded:
            self._loaded[key] = resolve_name(self.own[key])
        others = [] if key in self._loaded else self.extensions()
        if key in self._loaded:
            return self._loaded[key]
        refusal = refusal or f"there is no {self.what} {name!r}"
        for other in others:
            if other.name == name:
                raise RequestError(f"{refusal}; {other.package} has it, but does not load: {other.failure}")
        raise RequestError(f"{refusal}; {choose_one_of(name, self.own | self._loaded)}")

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        self.extensions()
        yield from [name for name in self._loaded if name not in self.own]

    def extensions(self) -> list[Extension]:
        """Import the classes of other packages; return all of them, with the reason where a class cannot be used."""
        found, taken = [], set(self.own)
        for point in sorted(entry_points(group=self.group), key=lambda point: (point.name, _package(point))):
            failure = f"the name {point.name} is taken already" if point.name in taken else self._load(point)
            if failure is None:
                taken.add(point.name)
            found.append(Extension(point.name, _package(point), failure))
        return found

    def _load(self, point: EntryPoint) -> str | None:
        """Import the class of an entry point; return why it cannot be used, or `None`."""
        try:
            self.register(point.name, point.load())
        except RequestError as error:
            return str(error)
        except (Exception, SystemExit) as error:  # code of another package
            return f"{type(error).__name__}: {first_line(error)}"
        return None


def _package(point: EntryPoint) -> str:
    """Return the name and the version of the package that brings an entry point."""
    return point.value if point.dist is None else f"{point.dist.name} {point.dist.version}"
