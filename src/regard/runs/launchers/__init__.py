"""Where many independent processes run: on this machine, or on a Ray cluster; each retried, none lost to a kill."""

from regard.runs.launchers.jobs import Ended, Job
from regard.runs.launchers.local import Local
from regard.runs.launchers.ray import Ray
from regard.runs.launchers.run import Engine, Event, run

__all__ = ["Ended", "Engine", "Event", "Job", "Local", "Ray", "run"]
