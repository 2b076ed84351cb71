"""Where profiles lie between runs: one file for each workflow, model, config and hardware."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from rlinf.errors import ConfigError
from rlinf.scheduler.identity import digest, hardware
from rlinf.scheduler.profile import Identity, Profile, load_profile, save_profile

FOLDER = "RLINF_PROFILES"  # environment variable
Places = Mapping[str, tuple[int, ...]]
"""Kind of device -> indices."""


def folder() -> Path:
    """``RLINF_PROFILES``, else ``~/.cache/rlinf/profiles``."""
    given = os.environ.get(FOLDER)
    return Path(given) if given else Path.home() / ".cache" / "rlinf" / "profiles"


def place_of(identity: Identity, places: Places) -> Path:
    """The file of a profile.

    Args:
        identity: what it is of.
        places: the devices that it was measured on.
    """
    key = digest([identity.workflow, identity.model, identity.config, hardware(places)])
    return folder() / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', identity.workflow)}-{key}.yaml"


def find(identity: Identity, places: Places, note: Callable[[str], None]) -> Profile | None:
    """The profile that was kept for this; ``None``: there is none that can be used.

    Args:
        identity: what it must be of.
        places: the devices at hand.
        note: told of a file that is there and cannot be used.
    """
    path = place_of(identity, places)
    if not path.exists():
        return None
    try:
        found = load_profile(path)
    except ConfigError as error:
        note(f"{error}; it is measured anew")
        return None
    if found.identity != identity or not places.keys() <= found.kinds.keys():
        note(
            f"the profile {path} is of {found.identity} on {', '.join(found.kinds)}, and what lies there must be of "
            f"{identity} on {', '.join(places)}: it was changed by hand, and is measured anew"
        )
        return None
    return found


def keep(profile: Profile, places: Places, note: Callable[[str], None]) -> Path | None:
    """Keep a profile for later runs. Returns where; ``None``: it could not be written, which is noted.

    Args:
        profile: what was measured.
        places: the devices that it was measured on.
        note: told why it is not kept.
    """
    path = place_of(profile.identity, places)
    try:
        save_profile(profile, path)
    except OSError as error:
        note(
            f"the profile could not be kept in {path.parent} ({error.strerror or error}): it will be measured again "
            f"next time; set {FOLDER} to a folder that can be written to"
        )
        return None
    return path
