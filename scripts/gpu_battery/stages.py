"""The stages of the battery. A new stage is a function of a `Run` and a line here."""

from __future__ import annotations

from scripts.gpu_battery.curves import curves, losses, sharding
from scripts.gpu_battery.run import Stage
from scripts.gpu_battery.speed import benchmark, kinds, verify
from scripts.gpu_battery.training import backbone, heads

CALL_SECONDS = 520  # of the nine minutes of a call; the rest is for starting up and for the report
STAGES = {
    "curves": Stage(curves, call=1, seconds=380),
    "losses": Stage(losses, call=1, seconds=80),
    "sharding": Stage(sharding, call=1, seconds=60),
    "backbone": Stage(backbone, call=2, seconds=240),
    "heads": Stage(heads, call=2, seconds=280, needs=("backbone",)),
    "benchmark": Stage(benchmark, call=3, seconds=210, needs=("heads",)),
    "verify": Stage(verify, call=3, seconds=90, needs=("heads",)),
    "kinds": Stage(kinds, call=3, seconds=220, needs=("heads",)),
}
