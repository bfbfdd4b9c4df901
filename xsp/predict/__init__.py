"""What a training step takes on N ranks: its tasks on resources, simulated, from a run of one.

`training` has the step as tasks, `schedule` when they run, `collectives` what communication costs, `buckets` which
gradients travel together, `prediction` the answer and what each constant is worth, `recorded` the step of a run.
"""
