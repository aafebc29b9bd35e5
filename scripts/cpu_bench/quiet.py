"""Whether the machine was the measured programs' own: what a hypervisor took (steal), and what other programs did."""

import os
import resource
import time

TICK = os.sysconf("SC_CLK_TCK")


class TooNoisy(Exception):
    """No quiet try among those that there are."""


class Watch:
    """Runs measurements until one was undisturbed. A measurement must reap all processes that it starts."""

    def __init__(self, steal_max, foreign_max, tries):
        self.steal_max, self.foreign_max, self.tries = steal_max, foreign_max, tries
        self.accepted, self.rejected = 0, 0
        self.steal_seen, self.foreign_seen = 0.0, 0.0

    def run(self, name, measure):
        """What `measure()` gave in the first undisturbed try."""
        seen = []
        for _ in range(self.tries):
            before = read()
            value = measure()
            steal, foreign = shares(before, read())
            if steal <= self.steal_max and foreign <= self.foreign_max:
                self.accepted += 1
                self.steal_seen, self.foreign_seen = max(self.steal_seen, steal), max(self.foreign_seen, foreign)
                return value
            self.rejected += 1
            seen.append(f"steal {steal:.1%}, other programs {foreign:.1%}")
            print(f"  rejected: {name}: {seen[-1]}", flush=True)
        raise TooNoisy(f"{name}: none of {self.tries} tries was quiet (at most {self.steal_max:.0%} steal and "
                       f"{self.foreign_max:.0%} of other programs): {'; '.join(seen)}. End what else runs, or raise "
                       "--steal-max, --foreign-max or --tries")


def read():
    """Seconds: of the wall, of the machine's cores busy with programs, of steal, of our own processes that have ended."""
    with open("/proc/stat") as stat:
        user, nice, system, _, _, _, _, steal = map(int, stat.readline().split()[1:9])
    own = sum(usage.ru_utime + usage.ru_stime
              for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
    return time.monotonic(), (user + nice + system) / TICK, steal / TICK, own


def shares(before, after):
    """Steal, and what other programs had, of all that the cores could have done in between."""
    wall, busy, steal, own = (b - a for a, b in zip(before, after))
    cores = wall * os.cpu_count()
    return steal / cores, max(0.0, busy - own) / cores
