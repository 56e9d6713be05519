"""Where many independent processes run: on this machine, or on a Ray cluster; each retried, none lost to a kill."""

from regard.engines.jobs import Ended, Job
from regard.engines.local import Local
from regard.engines.ray import Ray
from regard.engines.run import Engine, Event, run

__all__ = ["Ended", "Engine", "Event", "Job", "Local", "Ray", "run"]
