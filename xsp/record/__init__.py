"""Record a program: which levels are on in which step, what that costs, and how a step gets to the disk.

`session` is the block, `steps` its steps, `blocks` the blocks that the program names inside, `description` the content
of `run.json`. `schedule` chooses the turns, `budget` limits their cost and `overhead` measures it. `collecting`
switches the collectors. `storing` sends a step to the disk; `writer` is the measured program's side of the process that
stores steps, `xsp.store.write` the other side. `autostep` finds steps. `progress` reports on a run while it is
recorded, `terminal` draws the report.
"""
