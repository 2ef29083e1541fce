"""The engine as its front has it: a child process, the front's end of their socket, and the page with signs of life.

Started, asked to stop, and owned by `front`; what runs in the child is `engine_process`.
"""

import asyncio
import os
import sys
from asyncio.subprocess import Process

from splitserve.service.huge_pages import with_huge_pages
from splitserve.worker import commands
from splitserve.worker.clock import StepClock
from splitserve.worker.link import FrontLink, socket_pair

_STOP_GRACE_S = 3.0


class EngineProcess:
    """The engine as a child process, its link, and its step clock."""

    def __init__(self, process: Process, link: FrontLink, clock: StepClock) -> None:
        self.process = process
        self.link = link
        self.clock = clock

    @classmethod
    async def start(cls, module: str) -> "EngineProcess":
        """Runs `module`, the engine of a role."""
        ours, theirs = socket_pair()
        clock_fd = StepClock.create()
        fds = (theirs.fileno(), clock_fd)
        arguments = ["--link-fd", str(fds[0]), "--clock-fd", str(fds[1])]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module, *arguments),
            pass_fds=fds,
            env=with_huge_pages(os.environ),
        )
        theirs.close()
        clock = StepClock(clock_fd)
        os.close(clock_fd)
        return cls(process, await FrontLink.open(ours), clock)

    async def stop(self) -> None:
        """Asks, waits a little, then kills: an engine holds nothing that needs saving."""
        self.link.send(commands.Stop())
        try:
            async with asyncio.timeout(_STOP_GRACE_S):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        self.link.close()
