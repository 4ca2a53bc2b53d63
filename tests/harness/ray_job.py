"""Give a command to Ray's job manager, as `ray job submit` does, and wait for its end.

`python ray_job.py ADDRESS FOLDER COMMAND`: FOLDER gets the logs.

The server in front of the manager, which `ray job submit` asks, is in `ray[default]` alone.
"""

import asyncio
import sys

import ray
from ray._raylet import GcsClient
from ray.dashboard.modules.job.common import JobStatus
from ray.dashboard.modules.job.job_manager import JobManager


async def main(address: str, folder: str, command: str) -> int:
    """Return 0 where the command succeeded; what it printed is printed."""
    ray.init(address, log_to_driver=False)
    manager = JobManager(GcsClient(address=address), folder)
    job = await manager.submit_job(entrypoint=command)
    while not (status := await manager.get_job_status(job)).is_terminal():  # noqa: ASYNC110 - no event announces it
        await asyncio.sleep(0.2)
    print(status, (await manager.get_job_info(job)).message, manager.get_job_logs(job))
    return int(status is not JobStatus.SUCCEEDED)


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main(*sys.argv[1:])))
