"""Properties of devices: the machine of a run, its performance ceilings, and the information in kernel names."""
