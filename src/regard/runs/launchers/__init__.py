"""Where many independent processes run: on this machine, or on a Ray cluster; each retried, none lost to a kill."""

from regard.runs.launchers.choice import make_launcher
from regard.runs.launchers.jobs import Job, JobEvent, JobResult, Launcher, Local, run_jobs
from regard.runs.launchers.ray import Ray

__all__ = ["Job", "JobEvent", "JobResult", "Launcher", "Local", "Ray", "make_launcher", "run_jobs"]
