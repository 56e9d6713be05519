"""Where many independent processes run: on this machine, or on a Ray cluster; each retried, none lost to a kill."""

from regard.runs.launchers.jobs import Job, JobResult, Local
from regard.runs.launchers.ray import Ray
from regard.runs.launchers.run import JobEvent, Launcher, run_jobs

__all__ = ["Job", "JobEvent", "JobResult", "Launcher", "Local", "Ray", "run_jobs"]
