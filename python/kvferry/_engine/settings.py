"""The settings of adapters: what values they may have, and those of the store, which all adapters name alike."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

GIB = 1 << 30
# The longest retention, in seconds.
DURATION_MAX = 10 * 365 * 86_400.0


def check_known(given: Iterable[str], known: Collection[str], says: str) -> None:
    """Raises ValueError for a setting that does not exist. `says`: with places for these settings, and for all."""
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(says.format(", ".join(map(repr, unknown)), ", ".join(sorted(known))))


class Reader:
    """Reads settings by name. Raises ValueError for a wrong value, with the name and what is right.

    `where`: where they come from, for errors.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config, self._where = config, where

    def wrong(self, name: str, must: str) -> ValueError:
        return ValueError(f"{self._where}: {name} must be {must}, not {self._config.get(name)!r}")

    def number(
        self,
        name: str,
        default: float | None,
        least: float,
        most: float,
        *,
        whole: bool = False,
        needed: bool = True,
        must: str = "",
    ) -> Any:
        """`must`: what an error says of the range, where that is not from `least` to `most`."""
        value = self._config.get(name, default)
        if value is None:
            if needed:
                raise ValueError(f"{self._where}: {name} is missing; it is needed")
            return None
        kind = int if whole else int | float
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
            what = "a whole number" if whole else "a number"
            raise self.wrong(name, must or f"{what} from {least:g} to {most:g}")
        return value if whole else float(value)

    def switch(self, name: str) -> bool:
        value = self._config.get(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def choice(self, name: str, names: tuple[str, ...], default: str) -> Any:
        value = self._config.get(name, default)
        if value not in names:
            raise self.wrong(name, f"one of {', '.join(names)}")
        return value

    def text(self, name: str) -> str | None:
        value = self._config.get(name)
        if not isinstance(value, str | None):
            raise self.wrong(name, "a string")
        return value or None

    def path(self, name: str) -> Path | None:
        value = self.text(name)
        return Path(value) if value else None

    def texts(self, name: str, must: str = "a list of texts") -> tuple[str, ...] | None:
        """A list, or one text with commas."""
        value = self._config.get(name)
        if isinstance(value, str):
            value = [it.strip() for it in value.split(",") if it.strip()]
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(it, str) for it in value):
            raise self.wrong(name, must)
        return tuple(value)

    def directories(self, name: str) -> tuple[str, ...]:
        value = self._config.get(name)
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not names or not all(isinstance(it, str) and it for it in names):
            raise self.wrong(name, "a directory or a list of directories")
        return tuple(names)

    def options(self, name: str, of: str) -> Mapping[str, str | float]:
        """Options of the URL that the setting `of` is."""
        value = self._config.get(name) or {}
        if not isinstance(value, Mapping):
            raise self.wrong(name, "a mapping")
        if value and not self._config.get(of):
            raise ValueError(f"{self._where}: {name} needs {of}, the URL that they are for")
        return value


OF_STORE = (
    "disk",
    "disk_gib",
    "host_gib",
    "object",
    "object_options",
    "model",
    "share_tp",
    "priority",
    "priority_max",
    "duration_max",
    "lease",
    "blocks_max",
    "segment_mib",
    "direct",
    "adopt_empty",
    "must_exist",
)


@dataclass(frozen=True)
class StoreSettings:
    """What a deployment may choose. See docs/storage.md."""

    # In the order in which the store was made.
    directories: tuple[str, ...]
    disk_bytes: int
    # Of all ranks together.
    host_bytes: int = 0
    object: str | None = None
    object_options: Mapping[str, str | float] = field(default_factory=dict)
    # What names the weights, instead of the model's name and revision.
    model: str | None = None
    # Ranks of the largest tensor parallelism that shares the store.
    share_tp: int = 8
    # Of blocks whose request does not say one, and the highest that a request gets.
    priority: int = 35
    priority_max: int = 100
    # Seconds for which a request's priority above `priority` holds at most.
    duration_max: float | None = None
    # Seconds for which the blocks of a load can't leave.
    lease: float = 60.0
    blocks_max: int | None = None
    segment_mib: int | None = None
    direct: Literal["auto", "off", "require"] = "off"
    # Whether an empty directory takes the place of one that the store has lost.
    adopt_empty: bool = False
    # Whether opening fails where none of the directories has a store, instead of making one.
    must_exist: bool = False

    @staticmethod
    def of(config: Mapping[str, Any], where: str, of_engine: Iterable[str] = ()) -> StoreSettings:
        """Raises ValueError for a setting that does not exist or has a wrong value. `of_engine`: settings that the
        engine itself reads from the same mapping.
        """
        ours = {name: value for name, value in config.items() if name not in of_engine}
        check_known(ours, OF_STORE, f"kvferry's store has no setting {{}} in {where}; it has {{}}")
        read = Reader(ours, where)
        priority = read.number("priority", 35, 0, 100, whole=True)
        return StoreSettings(
            directories=read.directories("disk"),
            disk_bytes=int(read.number("disk_gib", None, 1 / 1024, 1 << 24) * GIB),
            host_bytes=int(read.number("host_gib", 0, 0, 1 << 20) * GIB),
            object=read.text("object"),
            object_options=read.options("object_options", "object"),
            model=read.text("model"),
            share_tp=read.number("share_tp", 8, 1, 1024, whole=True),
            priority=priority,
            priority_max=read.number("priority_max", 100, priority, 100, whole=True),
            duration_max=read.number("duration_max", None, 1, DURATION_MAX, needed=False),
            lease=read.number("lease", 60, 1, 3600),
            blocks_max=read.number("blocks_max", None, 1, 2**31, whole=True, needed=False),
            segment_mib=read.number("segment_mib", None, 1, 2**31, whole=True, needed=False),
            direct=read.choice("direct", ("auto", "off", "require"), "off"),
            adopt_empty=read.switch("adopt_empty"),
            must_exist=read.switch("must_exist"),
        )
