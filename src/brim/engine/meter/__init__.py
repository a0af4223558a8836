"""Where the time goes: stages, waiting, the share of the ceiling that is reached, and whole commands."""

from typing import TYPE_CHECKING

from brim.lazy import lazy

if TYPE_CHECKING:
    from brim.engine.meter.ceiling import CeilingProbe as CeilingProbe
    from brim.engine.meter.ceiling import CeilingShare as CeilingShare
    from brim.engine.meter.spent import Account as Account
    from brim.engine.meter.spent import Spent as Spent
    from brim.engine.meter.spent import accounting as accounting
    from brim.engine.meter.spent import current_account as current_account
    from brim.engine.meter.spent import of_this_process as of_this_process
    from brim.engine.meter.spent import within as within
    from brim.engine.meter.stalls import RunClock as RunClock
    from brim.engine.meter.stalls import StepTimes as StepTimes
    from brim.engine.meter.stalls import Times as Times
    from brim.engine.meter.stalls import behind_sleep_s as behind_sleep_s
    from brim.engine.meter.stalls import diagnose as diagnose
    from brim.engine.meter.stalls import find_syncs as find_syncs
    from brim.engine.meter.stalls import mean_times as mean_times
    from brim.engine.meter.stalls import time_step as time_step
    from brim.engine.meter.throughput import BUSY as BUSY
    from brim.engine.meter.throughput import INPUT as INPUT
    from brim.engine.meter.throughput import ROOM as ROOM
    from brim.engine.meter.throughput import GpuSampler as GpuSampler
    from brim.engine.meter.throughput import Meter as Meter
    from brim.engine.meter.throughput import ceiling_rate as ceiling_rate

__getattr__, __all__ = lazy(__name__, __file__)
