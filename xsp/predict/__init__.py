"""Predicts the time of a training step on N ranks by simulating the tasks of one rank's step on resources.

`recorded` reads the step of a run, `training` turns it into tasks, `schedule` simulates them, `collectives` has the
cost of communication, `buckets` groups gradients, `prediction` has the result and the gain of improving each constant.
"""
